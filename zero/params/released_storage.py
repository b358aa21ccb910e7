"""What `untyped_storage()` of a released parameter is: an identity without memory.

Libraries compare storages to find tied tensors before they save them. So equal storages mean one parameter, and
different parameters have different ones, though in truth they share a flat buffer or poison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.errors import StateError

_STORAGE_METADATA = frozenset(("_cdata", "_weak_ref", "device", "element_size", "get_device", "is_pinned"))


class ReleasedStorage:
    """Stands for the storage of `source`, as if that had one of its own. What would read or write it raises `refusal`.

    Args:
        storage: what its tensor has; its memory is never touched here.
    """

    def __init__(self, source: nn.Parameter, storage: torch.UntypedStorage, refusal: StateError) -> None:
        self._source, self._storage, self._refusal = source, storage, refusal

    def data_ptr(self) -> int:
        """A number that tells parameters apart. It is longer than an address, so that nothing is read there."""
        return id(self._source) << 64

    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self._source.numel() * self._source.element_size()

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReleasedStorage) and other._source is self._source

    def __hash__(self) -> int:
        return id(self._source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._source!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _STORAGE_METADATA:
            return getattr(self._storage, name)
        if hasattr(torch.UntypedStorage, name):
            raise self._refusal
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self, *_: Any) -> Any:
        raise self._refusal

    __getitem__ = __setitem__ = __deepcopy__ = __reduce_ex__ = _refuse
