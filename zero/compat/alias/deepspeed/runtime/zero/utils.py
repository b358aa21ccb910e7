"""`deepspeed.runtime.zero.utils`."""

from zero.compat.helpers import ZeRORuntimeException, is_zero_supported_optimizer
from zero.compat.partition_parameters import is_zero_param

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
