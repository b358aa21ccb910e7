"""Containers of checkpoints and snapshots: files that others read, written and read by range."""
