"""`deepspeed.runtime.fp16.loss_scaler`."""

from zero.compat.unavailable import CreateLossScaler, DynamicLossScaler, LossScaleConfig, LossScaleProfile, LossScaler

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile", "LossScaler"]
