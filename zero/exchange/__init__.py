"""What the ranks of one engine exchange: weights, gradients, and what they agree on at the start."""
