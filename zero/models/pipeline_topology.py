"""Positions of ranks in a grid of named axes, in row-major order. DeepSpeed's names."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from offload.errors import ConfigError
from zero.dist import backend, world

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


# ---- pipeline grid -------------------------------------------------------------------------------------------------
# `PipelineParallelGrid`: a rank's place in a pipeline, and the process groups of its stage and of its column.


class PipelineParallelGrid:
    """The ranks of a pipeline as seen by one of them; DeepSpeed's names. All ranks make it together.

    The groups are for the user's own collectives: the engine has others. `engine.grid` is one.

    Args:
        topology: with the axes "pipe" and "data", and "model" of length 1.
        process_group: no effect, as in DeepSpeed: the default group is used.

    Attributes:
        stage_id, data_parallel_id: this rank's coordinates.
        pp_group, dp_group: the ranks of its column (one of each stage), and of its stage.
        pp_proc_group, dp_proc_group: their process groups; None after `close`.
        pipe_groups, dp_groups: the same lists of ranks for all columns and all stages.
        p2p_groups: for each rank, itself and the rank of the next stage; the first stage follows the last.

    Raises:
        ConfigError: the topology is not of as many ranks as there are.
    """

    def __init__(self, topology: ProcessTopology, process_group: Any = None) -> None:
        self._topology = topology
        self.global_rank, self.world_size = world.rank(), world.world_size()
        if topology.world_size() != self.world_size:
            raise ConfigError(
                f"PipelineParallelGrid: topology: expected {self.world_size} ranks, got {topology.world_size()}"
            )
        sizes = (max(topology.get_dim(axis), 1) for axis in (PIPE, DATA, MODEL))
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = sizes
        self.slice_parallel_size = self.model_parallel_size
        place = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = int(getattr(place, PIPE)), int(getattr(place, DATA))
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.pipe_groups, self.dp_groups = topology.get_axis_comm_lists(PIPE), topology.get_axis_comm_lists(DATA)
        self.pp_group, self.pp_proc_group = self._open_group(self.pipe_groups)
        self.dp_group, self.dp_proc_group = self._open_group(self.dp_groups)
        following = {rank: ranks[(i + 1) % len(ranks)] for ranks in self.pipe_groups for i, rank in enumerate(ranks)}
        self.p2p_groups = [[rank, following[rank]] for rank in range(self.world_size)]
        self._slice_proc_group: Any = None

    def _open_group(self, groups: list[list[int]]) -> tuple[list[int], Any]:
        own: tuple[list[int], Any] = ([self.global_rank], None)
        for ranks in groups:
            handle = backend.new_default_group(ranks) if world.is_distributed() else None
            if self.global_rank in ranks:
                own = ranks, handle
        return own

    def topology(self) -> ProcessTopology:
        return self._topology

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a stage in this rank's column; `kwargs`: other coordinates than this rank's."""
        place: Any = self._topology.get_coord(self.global_rank)
        return self._topology.get_rank(**{**place._asdict(), PIPE: stage_id, **kwargs})

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The group of the ranks that the same micro-batches pass."""
        return self.pp_proc_group

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The group of the ranks that have the same stage."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_slice_parallel_rank(self) -> int:
        return 0

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """A group of this rank alone: there is no tensor parallelism."""
        if self._slice_proc_group is None and world.is_distributed():
            self._slice_proc_group = dist.new_group([self.global_rank], use_local_synchronization=True)
        return self._slice_proc_group

    def close(self) -> None:
        """End the groups. Idempotent."""
        for handle in (self.pp_proc_group, self.dp_proc_group, self._slice_proc_group):
            if handle is not None:  # which would be the default group
                backend.destroy_group(handle)
        self.pp_proc_group = self.dp_proc_group = self._slice_proc_group = None

    # DeepSpeed's model-parallel ranks are all that share a replica of the model: here those of a column.
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size = get_pipe_parallel_world_size
    get_model_parallel_group = get_pipe_parallel_group
    get_data_parallel_rank = get_data_parallel_id
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
