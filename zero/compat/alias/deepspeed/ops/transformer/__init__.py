"""`deepspeed.ops.transformer`."""

from zero.compat.unavailable import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
