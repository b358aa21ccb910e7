"""`deepspeed.ops.transformer`."""

from zero.compat.unavailable import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

from ..._names import attributes

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
__getattr__ = attributes(__name__)
