"""Read or replace the gradients accumulated since the last step, one parameter at a time; whole on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from offload.files.archives import bytes_of, bytes_tensor
from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum, rows_of
from offload.sizes import BLOCK_NUMEL, align_up
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Slot, Unit
from zero.store.collectives import Collectives
from zero.values.reader import CHUNK_NUMEL, join_runs, shard_runs


class GradientValues:
    """Gradients of an engine between a backward and the step, by slot."""

    def __init__(self, gradients: Gradients, collectives: Collectives) -> None:
        self._gradients, self._collectives = gradients, collectives
        self._placement = collectives.placement

    def wait_in_flight(self) -> None:
        """Wait until no gradient is in flight. Raises StorageError."""
        self._gradients.flush_all()
        self._gradients.wait_until_stored()

    def read(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        """The gradient over all ranks so far, (slot.numel,) fp32 on the host; None if no rank has any.

        All ranks call this together.
        """
        state = self._gradients.state_of(unit)
        unreduced = self._gradients.unreduced_gradients(unit.index).get(unit.index)
        has_gradient = bool(state.contributions[slot.position])
        answers = self._collectives.all_gather_bytes(
            f"gradient of {slot.name}", json.dumps([has_gradient, unreduced is not None]).encode()
        )
        states = [json.loads(answer) for answer in answers]
        if not any(has_gradient for has_gradient, _ in states):
            return None
        out = torch.empty(slot.numel, dtype=torch.float32, device="cpu")
        for lo in range(0, slot.numel, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, slot.numel)
            self._read_chunk(state, slot, unreduced, [has_unreduced for _, has_unreduced in states], out[lo:hi], lo)
        return out

    def _read_chunk(
        self,
        state: UnitGradient,
        slot: Slot,
        unreduced: torch.Tensor | None,
        has_unreduced: list[bool],
        out: torch.Tensor,
        lo: int,
    ) -> None:
        """Elements of the slot from `lo` on: reduced shards, plus the mean of gradients that are not reduced yet."""
        hi, placement = lo + out.numel(), self._placement
        runs = shard_runs(placement, state.unit, slot, slot.first_numel + lo, slot.first_numel + hi)
        run = runs[placement.shard_index]
        message = self._read_stored(state, slot, lo + run.start, lo + run.stop)
        if unreduced is not None:
            part = unreduced[slot.offset_numel + lo : slot.offset_numel + hi].float()
            message = torch.cat([message, part])
        answers = self._collectives.all_gather_bytes(f"gradient of {slot.name}", bytes_of(message.view(torch.uint8)))
        payloads = [bytes_tensor(answer) for answer in answers]
        join_runs(placement, runs, payloads, [out])
        addends = [
            payload.view(torch.float32)[-out.numel() :]
            for payload, included in zip(payloads, has_unreduced, strict=True)
            if included
        ]
        if addends:
            out += torch.stack(addends).sum(dim=0) * self._collectives.share
        out.mul_(self.factor_of(slot))

    def factor_of(self, slot: Slot) -> float:
        """What reading multiplies the stored values by; 0 for a dropped gradient."""
        factor = self._gradients.factors.get(slot.index, 1.0)
        return 0.0 if factor is None else factor

    def read_shard(self, unit: Unit, slot: Slot, begin: int, end: int) -> torch.Tensor | None:
        """Elements [begin, end) of the slot, which are in this rank's shard, fp32; None if this rank has none."""
        state = self._gradients.state_of(unit)
        # With several ranks, `contributions` counts only this rank's; parts without any gradient are stored as zeros.
        if state.is_empty or (self._placement.is_single_rank and not state.contributions[slot.position]):
            return None
        return self._read_stored(state, slot, begin, end) * self.factor_of(slot)

    def square_sum(self, slots: Sequence[tuple[Unit, Slot]]) -> SquareSum | None:
        """Over all ranks, without the factor; from the block sums where they are of these slots alone.

        All ranks call this together. None: some gradient is not reduced yet.
        """
        local_sum = SquareSum.merge(part for unit, slot in slots for part in self._shard_sums(unit, slot))
        has_unreduced = any(unit.index in self._gradients.unreduced_gradients(unit.index) for unit, _ in slots)
        answers = self._collectives.all_gather_bytes(
            f"norm of the gradient of {slots[0][1].name}", bytes([has_unreduced]) + local_sum.pack()
        )
        if any(answer[0] for answer in answers):
            return None
        return SquareSum.merge(SquareSum.unpack(answers[rank][1:]) for rank in self._placement.shard_ranks)

    def _shard_sums(self, unit: Unit, slot: Slot) -> Iterator[SquareSum]:
        state = self._gradients.state_of(unit)
        lo, hi = (coordinate - unit.begin for coordinate in unit.shard_range(slot))
        if state.is_empty or lo >= hi:
            return
        begin = min(align_up(lo, BLOCK_NUMEL), hi)
        end = hi if hi == unit.shard_numel else max(hi // BLOCK_NUMEL * BLOCK_NUMEL, begin)
        if begin < end:
            yield SquareSum.from_rows(rows_of(state.sums, begin, end))
        for first, last in ((lo, begin), (end, hi)):  # neighbours are in these blocks too
            if first < last:
                values = self._gradients.read_stored(state, unit.begin + first, unit.begin + last)
                yield SquareSum.from_rows(kernels.block_sumsq(values))

    def apply_factor(self, unit: Unit, slot: Slot) -> None:
        """Multiply what this rank has of the slot by its factor, which stays noted; a dropped gradient ends."""
        factor, state = self._gradients.factors.get(slot.index, 1.0), self._gradients.state_of(unit)
        self._gradients.scale_unreduced(unit, slot, factor)
        end = slot.first_numel + slot.numel
        run = shard_runs(self._placement, unit, slot, slot.first_numel, end)[self._placement.shard_index]
        for lo in range(run.start, run.stop if not state.is_empty else run.start, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, run.stop)
            values = self._read_stored(state, slot, lo, hi)
            self._write_stored(unit, slot, lo, torch.zeros_like(values) if factor is None else values * factor)
        if factor is None:
            self._gradients.drop_slot(unit, slot)

    def drop_factor(self, slot: Slot) -> None:
        """The slot's values contain its factor, or were replaced."""
        self._gradients.factors.pop(slot.index, None)

    def drop_unreduced(self, unit: Unit, slot: Slot) -> None:
        """Drop the slot's gradient that this rank has accumulated but not reduced yet."""
        self._gradients.scale_unreduced(unit, slot, None)

    def write_shard(self, unit: Unit, slot: Slot, begin: int, values: torch.Tensor) -> None:
        """Replace elements of the slot from `begin` on, which are in this rank's shard; rounded to the stored dtype.

        All ranks call this with the same slot, each with its own elements, after the updates of the last step.
        """
        state = self._gradients.state_of(unit)
        fresh = state.is_empty
        state.contributions[slot.position] = max(state.contributions[slot.position], 1)
        self._write_stored(unit, slot, begin, values, fresh=fresh)

    def _write_stored(self, unit: Unit, slot: Slot, begin: int, values: torch.Tensor, *, fresh: bool = False) -> None:
        """As `write_shard`; `fresh`: the unit has nothing yet. Whether the slot has a gradient stays as it is."""
        state = self._gradients.state_of(unit)
        self._gradients.reclaim_memory(unit)
        first = unit.origin + slot.offset_numel + begin
        last = first + values.numel()
        # A new gradient is zero elsewhere; of an existing one only the blocks that change are rewritten.
        lo, hi = first // BLOCK_NUMEL * BLOCK_NUMEL, min(align_up(last, BLOCK_NUMEL), unit.end)
        if fresh:
            lo, hi = unit.begin, unit.end
        for chunk_begin in range(lo, hi, CHUNK_NUMEL):
            chunk_end = min(chunk_begin + CHUNK_NUMEL, hi)
            chunk = (
                torch.zeros(chunk_end - chunk_begin, dtype=state.dtype, device="cpu")
                if fresh
                else self._gradients.read_stored(state, chunk_begin, chunk_end)
            )
            copy_begin, copy_end = max(first, chunk_begin), min(last, chunk_end)
            if copy_begin < copy_end:
                chunk[copy_begin - chunk_begin : copy_end - chunk_begin].copy_(
                    values[copy_begin - first : copy_end - first]
                )
            self._gradients.write_stored(state, chunk_begin, chunk)

    def _read_stored(self, state: UnitGradient, slot: Slot, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the slot in this rank's shard, fp32; zeros if nothing is stored."""
        if begin >= end or state.is_empty:
            return torch.zeros(max(end - begin, 0), dtype=torch.float32, device="cpu")
        first = state.unit.origin + slot.offset_numel
        return self._gradients.read_stored(state, first + begin, first + end).float()
