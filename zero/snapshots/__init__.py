"""Snapshots on NVMe, and what they and checkpoints keep of a run besides tensors."""
