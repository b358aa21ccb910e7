"""Snapshots on NVMe, and the state of a run besides its tensors, which snapshots and checkpoints save."""
