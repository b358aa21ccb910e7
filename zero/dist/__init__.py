"""Ranks: process groups, their order, and what ends their work together."""
