"""How much longer 16-bit matmuls take on a device than those in fp32, found by measuring.

A CPU without instructions for bf16 (avx512_bf16, amx_bf16) computes bf16 matmuls in a generic way that takes many times
as long as fp32. The flags do not tell how torch's library gets on with what is there, a matmul does.
"""

from __future__ import annotations

import functools
import time

import torch

WIDTH = 384
"""Of square matrices: small enough for tens of milliseconds where bf16 is slowest, large enough to keep cores busy."""
ROUNDS = 3


def bf16_slowdown(device: torch.device) -> float:
    """Time of a small bf16 matmul divided by fp32's on that device; measured once per process (tens of ms)."""
    return _measured(device.type)


@functools.cache
def _measured(kind: str) -> float:
    narrow, wide = (
        _seconds(torch.ones(WIDTH, WIDTH, dtype=dtype, device=kind)) for dtype in (torch.bfloat16, torch.float32)
    )
    return narrow / max(wide, 1e-9)


def _seconds(matrix: torch.Tensor) -> float:
    """The best of a few rounds, after one that makes what the library keeps of a shape."""
    seconds = []
    with torch.no_grad():
        for _ in range(1 + ROUNDS):
            begin = time.perf_counter()
            float((matrix @ matrix)[0, 0])  # reading an element waits for a device
            seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
