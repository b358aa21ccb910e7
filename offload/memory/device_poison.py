"""GPU address ranges of any length that read as NaN and share one granule of memory."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

import native
from offload.accelerator import kind_of, load_native, module_of, present_kind, synchronize
from offload.sizes import align_up

GRANULE_BYTES = 2 << 20  # Assumed for a GPU that is not present.


class DeviceArray:
    """Lets torch make a tensor over device memory. `address`: the first byte; `owner`: kept alive by this object."""

    def __init__(self, address: int, nbytes: int, owner: torch.Tensor | None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def poison_bytes(nbytes: int, device: torch.device) -> int:
    """Device memory that `nbytes` of poison take; on the host they take none, since their pages share a small block."""
    kind = kind_of(device)
    if kind is None or not kind.can_alias:  # without aliases no storage points at poison, see `flat_storage`
        return 0
    granule = _granule(_with_index(device)) if kind == present_kind() else GRANULE_BYTES
    return nbytes if granule is None or not nbytes else granule


def _with_index(device: torch.device) -> torch.device:
    return torch.device(device.type, module_of(device).current_device()) if device.index is None else device


@functools.cache
def _granule(device: torch.device) -> int | None:
    """Bytes of the block that all poison addresses of a GPU can share; None: its driver cannot map memory so."""
    try:
        lib = load_native(device).lib
    except native.NativeUnavailable:
        return None
    with module_of(device).device(device):
        granule = int(lib.zn_cuda_poison_granule(device.index))
    return granule if granule > 0 else None


def map_device_poison(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """`nbytes` of NaN on a GPU, uint8; None if its driver cannot map memory so."""
    device = _with_index(device)
    granule = _granule(device)
    if granule is None:
        return None
    library, mapped_bytes = load_native(device), align_up(nbytes, granule)
    out: Any = library.ffi.new("void **")
    with module_of(device).device(device):
        if library.lib.zn_cuda_poison_map(out, mapped_bytes, device.index) != 0:
            return None
    array = DeviceArray(int(library.ffi.cast("uintptr_t", out[0])), nbytes, None)

    def unmap() -> None:
        synchronize(device)
        with module_of(device).device(device):
            library.lib.zn_cuda_poison_unmap(out[0], mapped_bytes, device.index)

    weakref.finalize(array, unmap).atexit = False  # mappings end with the process anyway
    return torch.as_tensor(array, device=device)
