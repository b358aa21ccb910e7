"""Stores for tensors that autograd saves: of an engine, made from its plan, and without one."""

from __future__ import annotations

import torch

from offload.io_loop import IoLoop
from offload.planes.tiered_array import Disk
from offload.saved.activations import ActivationStore
from offload.saved.growing_pool import GrowingPool, SwapPool
from offload.saved.spill_store import SpillStore
from offload.streams import Streams
from zero.plan.activations_and_snapshots import ACTIVATION_BYTES_KEY
from zero.plan.plan import DEVICE, NVME, Plan


def open_activations(
    plan: Plan, device: torch.device, moving: tuple[Disk | None, IoLoop, Streams], *, pinned: bool
) -> ActivationStore | None:
    """The store of one engine; None if the plan gives saved activations no tier.

    Args:
        device: the compute device.
        moving: the engine's disk (None: there is none), mover and streams.
        pinned: page-lock host memory.
    """
    wish = plan.activations
    if wish.tier is None:
        return None
    disk, mover, streams = moving
    memory_bytes, swap = wish.nbytes, None
    if wish.tier == NVME and disk is not None:
        begin, memory_bytes = plan.swap_bytes - wish.swap_bytes, wish.in_flight_bytes
        swap = SwapPool(disk, begin, wish.swap_bytes, can_grow=wish.nbytes is None)
    return open_store(wish.tier, device, streams, memory_bytes, pinned=pinned, swap=swap, mover=mover)


def open_store(
    tier: str,
    device: torch.device,
    streams: Streams,
    nbytes: int | None = None,
    *,
    pinned: bool = True,
    swap: SwapPool | None = None,
    mover: IoLoop | None = None,
) -> ActivationStore:
    """A store over `nbytes` of memory; None: it grows. With `swap` tensors pass through the memory to the disk."""
    near = tier == DEVICE
    where = device if near else torch.device("cpu")
    memory = GrowingPool("saved activations", ACTIVATION_BYTES_KEY, where, nbytes, pinned=pinned and not near)
    pieces = SpillStore(memory, streams, is_device_memory=near, swap=swap, io_loop=mover)
    return ActivationStore(pieces, device, streams)
