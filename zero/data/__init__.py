"""Loaders of micro-batches, and how they go on where a run has stopped."""
