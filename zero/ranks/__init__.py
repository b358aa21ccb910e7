"""Processes that agree: who they are, in which order they talk, and what ends a wait."""
