"""`PipelineParallelGrid`: a rank's place in a pipeline, and the process groups of its stage and of its column."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from offload.errors import ConfigError
from zero.pipe.topology import DATA, MODEL, PIPE, ProcessTopology
from zero.ranks import backend, world


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
