"""Which dtype a device multiplies matrices fast in, found by measuring.

A CPU without instructions for bf16 computes such products many times slower than those in fp32. No list of features
tells it: it depends on the processor, on torch, and on the library that torch was built with.
"""

from __future__ import annotations

import functools
import time

import torch

from offload.accelerator import computes_bf16, is_accelerator
from offload.kernels.tile_threads import run_alone

CLEARLY_SLOWER = 2.0
"""bf16 halves what is kept and moved; a product that takes more than this many times as long is not worth it."""
ROWS, WIDTH = 128, 256
"""A layer small enough for milliseconds, and large enough that the product counts and not the call."""
REPEATS_MIN, REPEATS_MAX = 3, 8
"""The first calls of a process load libraries and make threads."""
SECONDS_MAX = 0.02
"""A dtype for which it is up has its fewest repeats."""


def bf16_slowdown(device: torch.device | str) -> float:
    """Time of a small bf16 matmul divided by that of fp32, on one core of a CPU; a few tens of milliseconds, once.

    The three products of a linear layer are timed together, forward and backward, as a processor can be good at one
    of them alone. Each dtype counts with the best of a few repeats.
    """
    return _slowdown(str(torch.device(device)))


def slow_bf16(device: torch.device | str) -> str:
    """Why fp32 is the better choice on the device, in words; empty where bf16 is no slower, or not by much."""
    if is_accelerator(torch.device(device)):
        return "" if computes_bf16(torch.device(device)) else "this GPU has no instructions for bf16"
    slowdown = bf16_slowdown(device)
    return f"bf16 matmuls take {slowdown:.0f} times as long on this CPU" if slowdown > CLEARLY_SLOWER else ""


@functools.cache
def _slowdown(device: str) -> float:
    seconds: dict[torch.dtype, float] = {}

    def measure() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            seconds[dtype] = layer_seconds(torch.device(device), dtype)

    # Several threads wait for each other behind every product, which on a busy machine takes longer than the product.
    run_alone(measure, 1)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def layer_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Least seconds for the products of a linear layer, forward and backward."""
    inputs, grads = (torch.ones(ROWS, WIDTH, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(WIDTH, WIDTH, device=device, dtype=dtype)
    least, begin = float("inf"), time.perf_counter()
    for count in range(1, REPEATS_MAX + 1):
        start = time.perf_counter()
        products = inputs @ weight.T, grads @ weight, grads.T @ inputs
        _ = [product[0, 0].item() for product in products]  # a device has then finished
        end = time.perf_counter()
        least = min(least, end - start)
        if count >= REPEATS_MIN and end - begin > SECONDS_MAX:
            break
    return least
