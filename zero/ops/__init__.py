"""Optimizers under DeepSpeed's names: they work without an engine, and `zero.initialize` takes them over."""
