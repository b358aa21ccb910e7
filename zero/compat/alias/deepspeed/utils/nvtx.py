"""`deepspeed.utils.nvtx`."""

from zero.compat.helpers import instrument_w_nvtx

__all__ = ["instrument_w_nvtx"]
