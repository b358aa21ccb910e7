"""`deepspeed.runtime.config`."""

from zero.compat.configs import DeepSpeedConfig, DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
