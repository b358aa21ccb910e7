"""Tensors, tiers and budgets: memory arenas, swap files, planes and the thread that moves bytes."""
