"""`deepspeed.inference.config`."""

from zero.compat.unavailable import DeepSpeedInferenceConfig

__all__ = ["DeepSpeedInferenceConfig"]
