"""All ranks of a pipeline: agreements and sums over its stages, and the groups for their messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import RankLostError
from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum
from offload.streams import Streams, open_streams
from zero.dist import backend, world
from zero.dist.comm import Comm, Group
from zero.params.layout import Placement
from zero.store.collectives import Collectives


class PipelineCollectives(Collectives):
    """The collectives of all ranks of a pipeline; a stage's engine has other collectives, of the ranks of that stage.

    A failure on one rank ends the waits of all ranks, on other stages too.

    Args:
        device: the device of activations.
        stage_ranks: the ranks of each stage; all ranks appear once.
        columns: for each part of the micro-batches the ranks that it passes, in the order of the stages.
        tied_prefixes: prefixes of names that this stage and an earlier one have; the earlier one saves them.
    """

    def __init__(
        self,
        device: torch.device,
        stage_ranks: Sequence[Sequence[int]],
        columns: Sequence[Sequence[int]],
        tied_prefixes: Collection[str] = (),
    ) -> None:
        self._comm = Comm(device, open_streams(device))
        super().__init__(Placement(self._comm.rank, self._comm.world_size))
        self._stage_ranks, self._columns, self._tied_prefixes = stage_ranks, columns, tuple(tied_prefixes)
        self._duplicates = SquareSum()
        self._stage_groups: list[Any] = []
        self.device = device
        # Micro-batches pass these ranks in this order; schedules use the handle for their messages.
        self.column: Group = self.group(range(len(stage_ranks)))

    @property
    def last_ranks(self) -> Sequence[int]:
        return self._stage_ranks[-1]

    def stage_comm(self, streams: Streams, *, fixed_order: bool) -> Comm:
        """The collectives of this rank's stage. Collective over all ranks."""
        rank = world.rank()
        handles = [backend.new_default_group(ranks) for ranks in self._stage_ranks]
        own = next(index for index, ranks in enumerate(self._stage_ranks) if rank in ranks)
        self._stage_groups.append(handles[own])
        comm = Comm(self.device, streams, process_group=handles[own], fixed_order=fixed_order, teams=self._stage_ranks)
        comm.fail_with(self._comm)
        return comm

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        return self._comm.all_gather_bytes(what, payload)

    def ended_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        return self._comm.ended_ranks(ranks)

    def gather_over_stages(self, what: str, payload: bytes) -> list[bytes]:
        answers = self._comm.all_gather_bytes(what, payload)
        return [answers[rank] for rank in self.column.ranks]

    def is_saved_here(self, name: str) -> bool:
        return not name.startswith(self._tied_prefixes)

    def duplicate_square_sum(self) -> SquareSum:
        return self._duplicates.negate()

    def group(self, stages: Sequence[int]) -> Group:
        """This column's ranks of some stages; a rank of another stage is alone. Collective, with the same stages."""
        return self._comm.group_from_list([[column[stage] for stage in stages] for column in self._columns])

    def all_gather(self, group: Group, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's `flat` (1-D, host, of one size on all), in the order of the group."""
        if group.size == 1:
            return (flat,)
        gathered = torch.empty(group.size * flat.numel(), dtype=flat.dtype, device=self.device)
        own = gathered[group.index * flat.numel() : (group.index + 1) * flat.numel()]
        own.copy_(flat)
        try:
            backend.wait_for_work(backend.all_gather(gathered, own, group.handle), self._comm.raise_if_failed)
        except RuntimeError as error:
            raise RankLostError(f"a message between pipeline stages failed: {error}") from error
        return backend.split_flat(gathered.cpu(), flat.numel())

    def begin_step(self) -> None:
        """Drop the square sums of gradients that another stage has too."""
        self._duplicates = SquareSum()

    def add_duplicate_gradient(self, gradient: torch.Tensor) -> None:
        """An earlier stage has this gradient (1-D, host) too, and counts it for the norm."""
        self._duplicates = SquareSum.merge([self._duplicates, SquareSum.from_rows(kernels.block_sumsq(gradient))])

    def raise_if_failed(self) -> None:
        """Raise the error that has ended the pipeline, if any."""
        self._comm.raise_if_failed()

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """The stages run together inside; see `Comm.failing_together`."""
        with self._comm.failing_together(what):
            yield

    def close(self, error: BaseException | None = None) -> None:
        self._comm.close(error)
        while self._stage_groups:
            backend.destroy_group(self._stage_groups.pop())
