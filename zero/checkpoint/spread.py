"""Tensors that lie in files in equal parts, one part a rank: read by range, never gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.errors import ConfigError
from offload.files.torch_file import Region
from zero.checkpoint.source import Saved


class Values(Protocol):
    """The elements of one tensor, in row-major order."""

    @property
    def dtype(self) -> torch.dtype:
        """What it is read as."""

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Elements from `begin` on into all of `out`. Raises StorageError."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor in the parts of several ranks.

    Element i is in part `(first + i) // part_numel`, at `base + (first + i) % part_numel` there. Tensors that were
    flattened together and then shared out have one `part_numel` and each a `first`; tensors of which each was shared
    out have each a `base`, and `first` 0.

    Attributes:
        parts: a region a rank.
        dtype: what it is read as; at least as wide as the regions.
    """

    parts: Sequence[Region]
    part_numel: int
    dtype: torch.dtype
    first: int = 0
    base: int = 0

    def read(self, begin: int, out: torch.Tensor) -> None:
        position, done = self.first + begin, 0
        while done < out.numel():
            rank, offset = divmod(position + done, self.part_numel)
            count = min(self.part_numel - offset, out.numel() - done)
            part, target = self.parts[rank], out[done : done + count]
            if part.dtype == self.dtype:
                part.read(self.base + offset, target)
            else:
                narrow = torch.empty(count, dtype=part.dtype)
                part.read(self.base + offset, narrow)
                target.copy_(narrow)
            done += count


@dataclass(frozen=True, slots=True)
class Same:
    """A tensor whose elements are all `value`."""

    value: float
    dtype: torch.dtype

    def read(self, begin: int, out: torch.Tensor) -> None:
        out.fill_(self.value)


class SpreadSource:
    """A `Source` of such tensors.

    Args:
        found: name -> (shape, values).
        where: the folder, for errors.
    """

    def __init__(self, found: Mapping[str, tuple[torch.Size, Values]], where: str) -> None:
        self._found, self._where = found, where
        self.tensors: Mapping[str, Saved] = {
            name: Saved(shape, values.dtype) for name, (shape, values) in found.items()
        }

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor. Raises StorageError."""
        if name not in self._found:
            raise ConfigError(f"{self._where}: has no {name}; it has {len(self._found)} tensors")
        shape, values = self._found[name]
        if not 0 <= begin <= end <= shape.numel():
            raise IndexError(f"{name}: elements [{begin}, {end}) of {shape.numel()}")
        out = torch.empty(end - begin, dtype=values.dtype)
        values.read(begin, out)
        return out

    def expect(self, wanted: Iterable[tuple[str, int, int]]) -> None:
        """Nothing is read ahead."""

    def close(self) -> None:
        """Nothing is open between two reads."""
