"""Positions of ranks in a grid of named axes, in row-major order. DeepSpeed's names."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

from offload.errors import ConfigError

PIPE, DATA, MODEL = "pipe", "data", "model"


class ProcessTopology:
    """Ranks on a grid; ranks that are neighbours on the last axis are consecutive.

    Args:
        axes: names, such as ["pipe", "data"].
        dims: length of each axis.

    Attributes:
        ProcessCoord: the class of coordinates, a named tuple with a field for each axis.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), [int(dim) for dim in dims]
        if len(self.axes) != len(self.dims) or min(self.dims, default=0) < 1:
            raise ConfigError(f"ProcessTopology: expected a length of at least 1 for each of {axes!r}, got {dims!r}")
        self._coordinates = list(itertools.product(*map(range, self.dims)))
        kind: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = kind

    @property
    def mapping(self) -> dict[NamedTuple, int]:
        """Coordinates -> rank."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}

    def world_size(self) -> int:
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """The length of an axis; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coordinates: int) -> int:
        """The rank at these coordinates. Raises ConfigError: an axis is missing, or a coordinate is off the grid."""
        if set(coordinates) != set(self.axes):
            raise ConfigError(f"get_rank: expected a coordinate for each of {self.axes}, got {coordinates}")
        coordinate = tuple(coordinates[axis] for axis in self.axes)
        if coordinate not in self._coordinates:
            raise ConfigError(f"get_rank: {coordinates} is not in a grid of {dict(zip(self.axes, self.dims))}")  # noqa: B905
        return self._coordinates.index(coordinate)

    def get_coord(self, rank: int) -> NamedTuple:
        """The coordinates of a rank, with a field for each axis."""
        if not 0 <= rank < self.world_size():
            raise ConfigError(f"get_coord: rank: expected 0 to {self.world_size() - 1}, got {rank}")
        coordinate: NamedTuple = self.ProcessCoord(*self._coordinates[rank])
        return coordinate

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = (DATA, PIPE), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinates as text, such as "pipe_00-data_01", without those on `omit_axes`."""
        place = zip(self.axes, self._coordinates[rank], strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in place if axis not in omit_axes)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks whose coordinate on an axis is `idx`, in order."""
        return self.filter_match(**{axis: idx})

    def filter_match(self, **coordinates: int) -> list[int]:
        """Ranks with these coordinates, in order."""
        at = {self.axes.index(axis): value for axis, value in coordinates.items()}
        return [r for r, c in enumerate(self._coordinates) if all(c[axis] == value for axis, value in at.items())]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lists of ranks that differ in this axis only; empty if there is none of that name."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        places = itertools.product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]


class PipeDataParallelTopology(ProcessTopology):
    """Stages with one rank for each part of the data; the ranks of a stage are consecutive."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """As `PipeDataParallelTopology`, with an axis for tensor parallelism; a `PipelineModule` takes one of length 1."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA, MODEL], [num_pp, num_dp, num_mp])
