"""Which bytes of a storage hold a tensor, and the same tensor rebuilt from a copy of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.sizes import ALIGN_BYTES

WASTE_MAX = 4  # A copy has at most so many times a view's bytes: bytes that several views share are then copied once.


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor views its storage.

    `begin`: first byte of the storage that it can reach; `end`: one past the last.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    begin: int
    end: int

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> View:
        """The view of `tensor`, which must be strided and not empty."""
        width, begin = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
        reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        return View(tensor.dtype, tensor.shape, tensor.stride(), begin, begin + (int(reach) + 1) * width)

    def rebuild(self, data: torch.Tensor, begin: int) -> torch.Tensor:
        """The tensor over `data` (uint8), a copy of the storage from byte `begin` on, with the same strides."""
        width = self.dtype.itemsize
        typed = data[: data.numel() // width * width].view(self.dtype)
        return typed.as_strided(self.size, self.stride, (self.begin - begin) // width)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors on one storage, as long as the storage or a weak reference to it is alive."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every in-place write; -1 for inference tensors, for which torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True, eq=False)
class UnmovedTensor:
    """A tensor that is saved without moving it; for `saved_tensors_hooks`."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> UnmovedTensor:
        """Detached: a node of autograd must not hold its own output, which would be a reference cycle."""
        return UnmovedTensor(tensor.detach(), version_of(tensor))

    def restore(self) -> torch.Tensor:
        """The tensor, after a check of its version: torch does not check it for tensors saved through hooks."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self.tensor.shape)} {self.tensor.dtype} is at version {version_of(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


def range_to_save(tensor: torch.Tensor, view: View) -> tuple[int, int] | None:
    """The range of the storage's bytes to copy; None: copy only the tensor, packed.

    It is all of the storage, unless the tensor is a small part of it. So one copy serves all views of the storage
    (query, key and value on one projection), with their strides and alignment.
    """
    own_bytes = tensor.numel() * tensor.element_size()
    whole_bytes = tensor.untyped_storage().nbytes()
    if whole_bytes <= WASTE_MAX * own_bytes:
        return 0, whole_bytes
    begin = view.begin // ALIGN_BYTES * ALIGN_BYTES
    return (begin, view.end) if view.end - begin <= WASTE_MAX * own_bytes else None


def bytes_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A uint8 view of bytes [begin, end) of the tensor's storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))
