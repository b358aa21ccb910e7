"""Snapshots on NVMe, and the small state of a run that they and checkpoints keep."""
