"""`deepspeed.accelerator.abstract_accelerator`."""

from zero.compat.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
