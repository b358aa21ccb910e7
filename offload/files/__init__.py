"""File formats of checkpoints and snapshots: files that other programs read, written and read by range."""
