"""`deepspeed.checkpoint`."""

from .._names import attributes

NAMES = {
    "DeepSpeedCheckpoint": "zero.compat.unavailable:DeepSpeedCheckpoint",
    "enable_universal_checkpoint": "zero.compat.unavailable:enable_universal_checkpoint",
}
__getattr__ = attributes(__name__, NAMES)
