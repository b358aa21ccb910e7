"""Optimizers under DeepSpeed's names: they step by themselves, and `zero.initialize` takes them over."""
