"""Flat storages that are bound to memory and unbound, while every view of them stays valid.

`bind` gives a storage the memory of a block, `unbind` takes it away; all tensors over the storage, also
those that autograd saved, see the change. While unbound, the storage points at poison: readable memory
that is NaN everywhere, so that a missed fetch gives NaN and not a crash.

Without `UntypedStorage._swap_data_ptr_` (torch 2.13 has it, 2.11 not), and for accelerators whose memory torch cannot
address, both functions resize a storage that torch owns, and copy; that costs a second copy of the memory.
On a device the copy is work of the stream that is current at `bind`, and the memory belongs to it: other
streams have to wait for that work, and to record with torch that they use the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.accelerator import is_accelerator, kind_of
from offload.errors import StateError
from offload.memory.device_poison import DeviceArray, map_device_poison
from offload.memory.host_memory import map_poison, tensor_over

CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def has_aliases(device: torch.device) -> bool:
    """True if torch can make tensors over the device's memory from an address."""
    kind = kind_of(device)
    return kind is None or kind.can_alias


def copies_to_bind(device: torch.device) -> bool:
    """True if `FlatStorage.bind` copies there, and takes as much memory again as what it binds."""
    return not (CAN_SWAP and has_aliases(device))


@torch.inference_mode(False)  # the I/O loop, whose thread is in the normal mode, writes into it
def exact_alias(data: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor over the memory of `data` (uint8, flat), with its own storage of exactly that length.

    On an accelerator without aliases (see `has_aliases`) it is `data` itself.
    """
    if data.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=data.device)
    if not has_aliases(data.device):
        return data
    if is_accelerator(data.device):
        return torch.as_tensor(DeviceArray(data.data_ptr(), data.numel(), data), device=data.device)
    return torch.from_numpy(data.numpy())


class Poison:
    """Memory that reads as NaN, as long as the largest flat storage; shared by all of them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if not is_accelerator(device):
            self._data = tensor_over(map_poison(nbytes))
        elif not has_aliases(device):  # no storage points at poison: each has its own memory while it is bound
            self._data = torch.empty(0, dtype=torch.uint8, device=device)
        else:
            mapped = map_device_poison(device, max(nbytes, 1))
            filled = torch.full((max(nbytes, 1),), 0xFF, dtype=torch.uint8, device=device) if mapped is None else mapped
            self._data = filled

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of exactly `nbytes` with its own storage over the poison."""
        return exact_alias(self._data[:nbytes])


@contextmanager
def viewable(tensor: torch.Tensor) -> Iterator[None]:
    """Inside, views of `tensor` can be made though its storage is empty: that of an unbound `FlatStorage` that copies.

    They can be used while it is bound.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may have another answer
        storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        yield
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage.resize_(int(tensor.storage_offset() + last + 1) * tensor.itemsize)
    try:
        yield
    finally:
        storage.resize_(0)


class FlatStorage:
    """A flat tensor of `numel` elements, bound to memory or poisoned.

    Attributes:
        flat: 1-D. Always the same object.
        views: one view of `flat` per entry of `cuts`.

    Args:
        cuts: (first element, shape) of each view. Views are made here and not later, because torch refuses
            new views of a storage while it is empty.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        cuts: Sequence[tuple[int, torch.Size]],
        poison: Poison,
        device: torch.device,
    ) -> None:
        self._nbytes, self._exact = numel * dtype.itemsize, has_aliases(device)
        self._swaps = not copies_to_bind(device)
        self._memory: torch.Tensor | None = None
        if self._swaps:
            self.flat = poison.tensor(self._nbytes).view(dtype)
        else:
            self.flat = torch.empty(numel, dtype=dtype, device=device)
        self.views = [self.flat[begin : begin + shape.numel()].view(shape) for begin, shape in cuts]
        if not self._swaps:
            self.flat.untyped_storage().resize_(0)

    @property
    def is_bound(self) -> bool:
        """True between `bind` and `unbind`."""
        return self._memory is not None

    @property
    def copies_on_bind(self) -> bool:
        """True if `bind` copies."""
        return not self._swaps

    def is_base_of(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a view of this storage."""
        if tensor.layout != torch.strided:
            return False
        with torch._C.DisableTorchFunctionSubclass():  # else an evicted parameter would fetch its values
            return bool(tensor.untyped_storage()._cdata == self.flat.untyped_storage()._cdata)

    def bind(self, data: torch.Tensor) -> None:
        """Give `flat` and its views the memory of `data` (uint8, with a storage of exactly that length).

        `data` itself must not be used until `unbind` returns it: meanwhile it points at the poison. Raises StateError:
        already bound, or the sizes differ.
        """
        if self._memory is not None:
            raise StateError("bind: the storage is already bound")
        storage = data.untyped_storage()
        nbytes = storage.nbytes() if self._exact else data.numel()
        if nbytes != self._nbytes or (self._exact and data.storage_offset() != 0):
            raise StateError(f"bind: expected a storage of {self._nbytes:,} bytes, got {nbytes:,}")
        if self._nbytes == 0:
            self._memory = data
            return
        if self._swaps:
            self.flat.untyped_storage()._swap_data_ptr_(storage)  # type: ignore[attr-defined]
        else:
            self.flat.untyped_storage().resize_(self._nbytes)
            # Through .data, which does not count as a modification of tensors that autograd saved.
            self.flat.data.view(torch.uint8).copy_(data)
        self._memory = data

    def bind_same_memory(self, other: FlatStorage) -> None:
        """Give `flat` the memory of `other`, which stays bound; without swapping, a copy of it."""
        data = other.flat.detach().view(torch.uint8)
        self.bind(exact_alias(data) if self._swaps else data)

    def unbind(self, *, modified: bool = True) -> torch.Tensor:
        """Poison `flat` again and return the memory that was bound. Raises StateError: not bound.

        `modified`: False if nobody has written to `flat`, which need not be copied back then.
        """
        if self._memory is None:
            raise StateError("unbind: the storage is not bound")
        data, self._memory = self._memory, None
        if self._nbytes == 0:
            return data
        if self._swaps:
            self.flat.untyped_storage()._swap_data_ptr_(data.untyped_storage())  # type: ignore[attr-defined]
        else:
            if modified:
                data.copy_(self.flat.view(torch.uint8))
            self.flat.untyped_storage().resize_(0)
        return data
