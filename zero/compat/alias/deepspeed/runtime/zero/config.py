"""`deepspeed.runtime.zero.config`."""

from zero.compat.configs import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum

__all__ = ["DeepSpeedZeroConfig", "OffloadDeviceEnum", "ZeroStageEnum"]
