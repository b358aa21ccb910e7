"""Checkpoints: one logical form for every stage, tier and number of ranks."""
