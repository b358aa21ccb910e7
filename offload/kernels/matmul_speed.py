"""Measures in which dtype a device multiplies matrices fast.

A CPU without bf16 instructions computes bf16 products many times slower than fp32 products. No list of CPU features
can predict this: it depends on the processor, on torch, and on the library that torch was built with.
"""

from __future__ import annotations

import functools
import time

import torch

from offload.accelerator import has_bf16, is_accelerator
from offload.kernels.tile_threads import run_in_tile_threads

CLEARLY_SLOWER = 2.0
"""bf16 halves the bytes kept and moved; this is not worth it if a product takes more than this many times as long."""
ROWS, WIDTH = 128, 256
"""The layer is small enough for milliseconds, and large enough that the product dominates the cost of the call."""
REPEATS_MIN, REPEATS_MAX = 3, 8
"""More than one repeat: the first calls of a process load libraries and make threads."""
SECONDS_MAX = 0.02
"""Per dtype; after that no repeat begins beyond REPEATS_MIN."""


def bf16_slowdown(device: torch.device | str) -> float:
    """Time of a small bf16 matmul divided by that of fp32, on one core of a CPU; a few tens of milliseconds, once.

    The three products of a linear layer (forward and backward) are timed together, since a processor may be fast at
    only one of them. The best of a few repeats counts for each dtype.
    """
    return _slowdown(str(torch.device(device)))


def slow_bf16(device: torch.device | str) -> str:
    """A text that says why fp32 is better on the device; empty if bf16 is not slower, or only a little."""
    if is_accelerator(torch.device(device)):
        return "" if has_bf16(torch.device(device)) else "this GPU has no instructions for bf16"
    slowdown = bf16_slowdown(device)
    return f"bf16 matmuls take {slowdown:.0f} times as long on this CPU" if slowdown > CLEARLY_SLOWER else ""


@functools.cache
def _slowdown(device: str) -> float:
    seconds: dict[torch.dtype, float] = {}

    def measure() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            seconds[dtype] = layer_seconds(torch.device(device), dtype)

    # One thread: several would wait for each other after each product, on a busy machine for longer than it takes.
    run_in_tile_threads(measure, 1)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def layer_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Least seconds for the products of a linear layer, forward and backward."""
    inputs, grads = (torch.ones(ROWS, WIDTH, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(WIDTH, WIDTH, device=device, dtype=dtype)
    least, begin = float("inf"), time.perf_counter()
    for count in range(1, REPEATS_MAX + 1):
        start = time.perf_counter()
        products = inputs @ weight.T, grads @ weight, grads.T @ inputs
        _ = [product[0, 0].item() for product in products]  # waits until the device has finished
        end = time.perf_counter()
        least = min(least, end - start)
        if count >= REPEATS_MIN and end - begin > SECONDS_MAX:
            break
    return least
