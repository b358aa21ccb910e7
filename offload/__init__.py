"""Tensors, tiers and budgets: memory pools, swap files, tiered arrays and the thread that moves bytes."""
