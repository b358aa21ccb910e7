"""Stores for tensors that autograd saves: of an engine, made from its plan, and without one."""

from __future__ import annotations

import torch

from offload.array.activations import ActivationStore
from offload.array.growing_pool import GrowingPool, SwapPool
from offload.array.spill_store import SpillStore
from offload.array.tiered_array import Disk
from offload.io.io_loop import IoLoop
from offload.streams import Streams
from zero.plan.plan import DEVICE, NVME, Plan
from zero.plan.planner import ACTIVATION_BYTES_KEY


def open_activations(
    plan: Plan, device: torch.device, disk: Disk | None, io_loop: IoLoop, streams: Streams, *, pinned: bool
) -> ActivationStore | None:
    """The store of one engine; None if the plan gives saved activations no tier.

    Args:
        device: the compute device.
        disk: the engine's disk; None: there is none.
        io_loop: the engine's I/O loop.
        streams: the engine's streams.
        pinned: page-lock host memory.
    """
    activations = plan.activations
    if activations.tier is None:
        return None
    memory_bytes, swap = activations.nbytes, None
    if activations.tier == NVME and disk is not None:
        begin, memory_bytes = plan.swap_bytes - activations.swap_bytes, activations.in_flight_bytes
        swap = SwapPool(disk, begin, activations.swap_bytes, can_grow=activations.nbytes is None)
    return open_store(activations.tier, device, streams, memory_bytes, pinned=pinned, swap=swap, io_loop=io_loop)


def open_store(
    tier: str,
    device: torch.device,
    streams: Streams,
    nbytes: int | None = None,
    *,
    pinned: bool = True,
    swap: SwapPool | None = None,
    io_loop: IoLoop | None = None,
) -> ActivationStore:
    """A store over `nbytes` of memory; None: it grows. With `swap` tensors pass through the memory to the disk."""
    on_device = tier == DEVICE
    memory_device = device if on_device else torch.device("cpu")
    memory = GrowingPool(
        "saved activations", ACTIVATION_BYTES_KEY, memory_device, nbytes, pinned=pinned and not on_device
    )
    pieces = SpillStore(memory, streams, is_device_memory=on_device, swap=swap, io_loop=io_loop)
    return ActivationStore(pieces, device, streams)
