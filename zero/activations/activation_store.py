"""The store for tensors that autograd saves, made from a plan."""

from __future__ import annotations

import torch

from offload.mover import Mover
from offload.planes.planes import Disk
from offload.saved.activations import ActivationStore
from offload.saved.slabs import Slabs, SwapArea
from offload.saved.spill_store import PieceStore, Swap
from offload.streams import Streams
from zero.plan.beside_planes import KNOB
from zero.plan.plan import DEVICE, NVME, Plan


def open_activations(
    plan: Plan, device: torch.device, moving: tuple[Disk | None, Mover, Streams], *, pinned: bool
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
    near, on_disk = wish.tier == DEVICE, wish.tier == NVME
    memory_bytes = wish.passing_bytes if on_disk else wish.nbytes
    where = device if near else torch.device("cpu")
    memory = Slabs("saved activations", KNOB, where, memory_bytes, pinned=pinned and not near)
    swap = None
    if on_disk and disk is not None:
        begin = plan.swap_bytes - wish.swap_bytes
        swap = Swap(disk, SwapArea(disk.swap, begin, wish.swap_bytes, grows=wish.nbytes is None))
    pieces = PieceStore("saved activations", memory, streams, near=near, swap=swap, mover=mover)
    return ActivationStore(pieces, device, streams)
