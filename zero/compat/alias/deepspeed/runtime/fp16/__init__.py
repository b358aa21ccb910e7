"""`deepspeed.runtime.fp16`."""

from ..._names import attributes

__getattr__ = attributes(__name__)
