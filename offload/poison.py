"""Addresses of a GPU that read as NaN and share one granule of its memory, however many there are."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

import native
from offload.sizes import align_up

GRANULE_BYTES = 2 << 20
"""Of a GPU that is not here to be asked."""


class DeviceArray:
    """Lets torch look at device memory.

    Args:
        address: of the first byte.
        nbytes: how many.
        owner: kept as long as somebody looks.
    """

    def __init__(self, address: int, nbytes: int, owner: torch.Tensor | None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def poison_bytes(nbytes: int, device: torch.device) -> int:
    """What `nbytes` that read as NaN take of the device's memory; the host's pages share a small block."""
    if device.type == "cpu" or not nbytes:
        return 0
    granule = _granule(_index(device)) if torch.cuda.is_available() else GRANULE_BYTES
    return nbytes if granule is None else granule


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _granule(index: int) -> int | None:
    """Bytes that all addresses can share on a GPU; None: its driver maps nothing."""
    try:
        lib = native.load_cuda().lib
    except native.NativeUnavailable:
        return None
    with torch.cuda.device(index):
        granule = int(lib.zn_cuda_poison_granule(index))
    return granule if granule > 0 else None


def map_on_device(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """`nbytes` of NaN on a GPU, uint8; None where its driver cannot map memory so."""
    index = _index(device)
    granule = _granule(index)
    if granule is None:
        return None
    cuda, mapped_bytes = native.load_cuda(), align_up(nbytes, granule)
    out: Any = cuda.ffi.new("void **")
    with torch.cuda.device(index):
        if cuda.lib.zn_cuda_poison_map(out, mapped_bytes, index) != 0:
            return None
    array = DeviceArray(int(cuda.ffi.cast("uintptr_t", out[0])), nbytes, None)

    def unmap() -> None:
        torch.cuda.synchronize(index)
        with torch.cuda.device(index):
            cuda.lib.zn_cuda_poison_unmap(out[0], mapped_bytes, index)

    weakref.finalize(array, unmap).atexit = False  # the process takes its mappings with it
    return torch.as_tensor(array, device=device)
