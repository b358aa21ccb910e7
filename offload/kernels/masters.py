"""The fp32 master of a weight: what is kept beside the weight so that both together give it back, bit for bit.

fp32 weights are the master. Beside a bf16 weight its 16-bit remainder is kept, beside an fp16 weight the whole master:
fp16 covers too few exponents for a remainder to be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels import kernels

REMAINDERS: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def remainder_dtype(weight: torch.dtype) -> torch.dtype | None:
    """What is kept beside weights of this dtype; None: nothing."""
    return REMAINDERS.get(weight)


def part(weight: Tensor, remainder: Tensor | None, master: Tensor) -> None:
    """Round fp32 values to weights, and keep what the weights lack of them.

    Args:
        weight: (N,) fp32, bf16 or fp16, written.
        remainder: (N,), of the dtype that goes with it; written.
        master: (N,) fp32, on any device.
    """
    if remainder is not None and remainder.dtype == torch.int16:
        kernels.split(weight, remainder, master.to(weight.device))
        return
    weight.copy_(master)
    if remainder is not None:
        remainder.copy_(master)


def whole(out: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """The fp32 master.

    Args:
        out: (N,) fp32, written; on the device of the weights if there is an int16 remainder.
        weight: (N,) fp32, bf16 or fp16.
        remainder: (N,), of the dtype that goes with it.
    """
    if remainder is None:
        out.copy_(weight)
    elif remainder.dtype == torch.int16:
        kernels.join(out, weight, remainder)
    else:
        out.copy_(remainder)


def forget(weight: Tensor, remainder: Tensor) -> None:
    """The weight is exact, whatever the master was."""
    if remainder.dtype == torch.int16:
        remainder.zero_()
    else:
        remainder.copy_(weight)


def forget_where(mask: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """As `forget`, where `mask` is true.

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
