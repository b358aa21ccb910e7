"""The fp32 master of a weight: a remainder is kept with the weight, and both together give the master, bit for bit.

fp32 weights are the master. A bf16 weight has a 16-bit remainder. An fp16 weight has the whole fp32 master as its
remainder: fp16 covers too few exponents for a 16-bit remainder to be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels import kernels

REMAINDERS: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def remainder_dtype(weight: torch.dtype) -> torch.dtype | None:
    """The dtype of the remainder for weights of this dtype; None: they have none."""
    return REMAINDERS.get(weight)


def split(weight: Tensor, remainder: Tensor | None, master: Tensor) -> None:
    """Split fp32 masters into weights and remainders.

    Args:
        weight: (N,) fp32, bf16 or fp16, written.
        remainder: (N,), of the weights' `remainder_dtype`; written.
        master: (N,) fp32, on any device.
    """
    if remainder is not None and remainder.dtype == torch.int16:
        kernels.split(weight, remainder, master.to(weight.device))
        return
    weight.copy_(master)
    if remainder is not None:
        remainder.copy_(master)


def join(out: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """Compute the fp32 masters.

    Args:
        out: (N,) fp32, written; on the device of the weights if there is an int16 remainder.
        weight: (N,) fp32, bf16 or fp16.
        remainder: (N,), of the weights' `remainder_dtype`.
    """
    if remainder is None:
        out.copy_(weight)
    elif remainder.dtype == torch.int16:
        kernels.join(out, weight, remainder)
    else:
        out.copy_(remainder)


def reset_remainder(weight: Tensor, remainder: Tensor) -> None:
    """Make the weight the exact master: the remainder is reset."""
    if remainder.dtype == torch.int16:
        remainder.zero_()
    else:
        remainder.copy_(weight)


def reset_remainder_where(mask: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """As `reset_remainder`, for the elements whose `mask` is true.

    Args:
        mask: (N,) bool, on any device.
        weight: (N,) bf16 or fp16, on any device.
        remainder: (N,), written.
    """
    edited = mask.to(remainder.device)
    if remainder.dtype == torch.int16:
        remainder.masked_fill_(edited, 0)
    else:
        remainder.copy_(torch.where(edited, weight.to(remainder.device, torch.float32), remainder))
