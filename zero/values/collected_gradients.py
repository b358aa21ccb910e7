"""The gradients collected since the last step, one parameter at a time: read whole on every rank, and replaced."""

from __future__ import annotations

import json

import torch

from offload.errors import StateError
from offload.kernels import kernels
from offload.kernels.square_sums import rows_of
from offload.memory.byte_tensors import bytes_of, tensor_of
from offload.planes.copies import read_plane, write_plane
from offload.sizes import BLOCK_NUMEL, align_up
from zero.exchange.exchange import Exchange
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Slot, Unit
from zero.store.storage import Storage
from zero.values.gathered_values import CHUNK_NUMEL, runs_of


class GradientValues:
    """Gradients of an engine between a backward and the step, by slot.

    Args:
        gradients: of the engine.
        storage: where they are.
        exchange: with the other ranks.
    """

    def __init__(self, gradients: Gradients, storage: Storage, exchange: Exchange) -> None:
        self._gradients, self._storage, self._exchange = gradients, storage, exchange
        self._placement = exchange.placement

    def settle(self) -> None:
        """Nothing is on its way when this returns. Raises StorageError."""
        self._gradients.flush_all()
        self._gradients.settle()

    def read(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        """The mean over all ranks, (slot.numel,) fp32 on the host; None if no rank has any. All ranks come here."""
        state, waiting = self._state(unit), self._gradients.waiting().get(unit.index)
        had = bool(state.contributions[slot.position])
        answers = self._exchange.agree(f"gradient of {slot.name}", json.dumps([had, waiting is not None]).encode())
        told = [json.loads(answer) for answer in answers]
        if not any(had for had, _ in told):
            return None
        out = torch.empty(slot.numel)
        for lo in range(0, slot.numel, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, slot.numel)
            self._read_chunk(state, slot, waiting, [waits for _, waits in told], out[lo:hi], lo)
        return out

    def _read_chunk(
        self,
        state: UnitGradient,
        slot: Slot,
        waiting: torch.Tensor | None,
        waits: list[bool],
        out: torch.Tensor,
        lo: int,
    ) -> None:
        """Elements of the slot from `lo` on: slices of what is reduced, and the mean of what is not."""
        hi, placement = lo + out.numel(), self._placement
        runs = runs_of(placement, state.unit, slot, slot.first_numel + lo, slot.first_numel + hi)
        own = runs[placement.shard_index]
        message = self._stored(state, slot, lo + own.start, lo + own.stop)
        if waiting is not None:
            part = waiting[slot.offset_numel + lo : slot.offset_numel + hi].float()
            message = torch.cat([message, part])
        answers = self._exchange.agree(f"gradient of {slot.name}", bytes_of(message.view(torch.uint8)))
        parts = [tensor_of(answer).view(torch.float32) for answer in answers]
        for run, rank in zip(runs, placement.shard_ranks, strict=True):
            out[run].copy_(parts[rank][: run.stop - run.start])
        late = [part[part.numel() - out.numel() :] for part, has in zip(parts, waits, strict=True) if has]
        if late:
            out += torch.stack(late).sum(dim=0) / placement.world_size

    def read_own(self, unit: Unit, slot: Slot, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of the slot, which are in this rank's slice, fp32; None if this rank has none."""
        state = self._state(unit)
        # What one rank has given says nothing of what others have: there the rest of a unit is zero.
        if state.empty or (self._placement.alone and not state.contributions[slot.position]):
            return None
        return self._stored(state, slot, begin, end)

    def drop_waiting(self, unit: Unit, slot: Slot) -> None:
        """Forget what this rank has collected for the slot and not reduced yet."""
        self._gradients.drop_waiting(unit, slot)

    def write_own(self, unit: Unit, slot: Slot, begin: int, values: torch.Tensor) -> None:
        """Replace elements of the slot from `begin` on, which are in this rank's slice; rounded to what is kept.

        All ranks come here with the same slot, each with its own elements, after the updates of the last step.
        """
        state = self._state(unit)
        fresh = state.empty
        self._gradients.reclaim(unit)
        first = unit.origin + slot.offset_numel + begin
        last = first + values.numel()
        state.contributions[slot.position] = max(state.contributions[slot.position], 1)
        state.summed = True
        # A new gradient is zero elsewhere; of one that is there only the blocks that change are rewritten.
        lo, hi = (unit.begin, unit.end) if fresh else _blocks(unit, first, last)
        for at in range(lo, hi, CHUNK_NUMEL):
            to = min(at + CHUNK_NUMEL, hi)
            chunk = torch.zeros(to - at, dtype=state.dtype) if fresh else self._plane_part(state, at, to)
            begins, ends = max(first, at), min(last, to)
            if begins < ends:
                chunk[begins - at : ends - at].copy_(values[begins - first : ends - first])
            kernels.block_sumsq(chunk, into=rows_of(state.sums, at - unit.begin, to - unit.begin))
            job = write_plane(state.plane, at, to, chunk.view(torch.uint8), self._storage.arena)
            self._storage.mover.run(f"storing the gradient of {slot.name}", job)

    def _state(self, unit: Unit) -> UnitGradient:
        for state in self._gradients.states():
            if state.unit.index == unit.index:
                return state
        raise StateError(f"{unit.name} is not trained: it has no gradient")

    def _stored(self, state: UnitGradient, slot: Slot, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the slot in this rank's slice, fp32; zeros if nothing is stored."""
        if begin >= end or state.empty:
            return torch.zeros(max(end - begin, 0))
        first = state.unit.origin + slot.offset_numel + begin
        last = first + end - begin
        lo, hi = _blocks(state.unit, first, last)
        return self._plane_part(state, lo, hi)[first - lo : last - lo].float()

    def _plane_part(self, state: UnitGradient, lo: int, hi: int) -> torch.Tensor:
        """A copy of coordinates [lo, hi), whole blocks."""
        memory = state.plane.memory(lo, hi)
        if memory is not None:
            return memory.view(state.dtype).to("cpu", copy=True)
        out = torch.empty(state.plane.nbytes(lo, hi), dtype=torch.uint8)
        job = read_plane(state.plane, lo, hi, out, self._storage.arena)
        self._storage.mover.run(f"reading the gradient of {state.unit.name}", job)
        return out.view(state.dtype)


def _blocks(unit: Unit, first: int, last: int) -> tuple[int, int]:
    """Coordinates of the whole blocks around [first, last) in the unit's slice."""
    return first // BLOCK_NUMEL * BLOCK_NUMEL, min(align_up(last, BLOCK_NUMEL), unit.end)
