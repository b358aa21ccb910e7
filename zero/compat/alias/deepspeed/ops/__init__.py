"""`deepspeed.ops`."""

from .._names import attributes

NAMES = {
    "DeepSpeedTransformerConfig": "zero.compat.unavailable:DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer": "zero.compat.unavailable:DeepSpeedTransformerLayer",
    "__compatible_ops__": "zero.compat.operators:compatible_ops",
}
__getattr__ = attributes(__name__, NAMES)
