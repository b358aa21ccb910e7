"""`deepspeed.runtime.fp16.onebit`."""

from ...._names import attributes

__getattr__ = attributes(__name__)
