"""Loaders of micro-batches, which a resumed run continues where the run has stopped."""
