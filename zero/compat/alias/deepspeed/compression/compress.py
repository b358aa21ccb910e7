"""`deepspeed.compression.compress`."""

from zero.compat.unavailable import init_compression, redundancy_clean, student_initialization

__all__ = ["init_compression", "redundancy_clean", "student_initialization"]
