"""What several ranks need of each other, over torch.distributed."""
