"""Stored values of all ranks, read by parameter; and a check that all ranks have changed the model alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from offload.archives import bytes_of, bytes_tensor
from offload.errors import StateError
from zero.exchange.all_ranks import DeferringFailures
from zero.exchange.collectives import Collectives
from zero.params.layout import Slot, Unit
from zero.params.placement import Placement
from zero.store.adoption import Piece
from zero.store.stored_values import StoredValues

CHUNK_NUMEL = 1 << 20  # Elements per message; with their states, at most 14 bytes each.
SHOWN_MAX = 3


class GatheredValues:
    """`StoredValues` of several ranks. All ranks read the same parameters, in the same order.

    `local`: the values that this rank stores.
    """

    def __init__(self, local: StoredValues, collectives: Collectives) -> None:
        self._local, self._collectives = local, collectives

    def pieces(self, parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterator[Piece]:
        """As `StoredValues.pieces`; on the host."""
        for unit, slot in self._local.slots_of(parameter):
            first, last = max(begin, slot.first_numel), min(end, slot.first_numel + slot.numel)
            for lo in range(first, last, CHUNK_NUMEL):
                yield self._piece(unit, slot, lo, min(lo + CHUNK_NUMEL, last), state and unit.trainable)

    def _piece(self, unit: Unit, slot: Slot, begin: int, end: int, state: bool) -> Piece:
        dtypes = [unit.dtype]
        if state:
            dtypes += [] if unit.remainder is None else [unit.remainder]
            dtypes += [torch.float32] * self._local.states_count(unit)
        values = [torch.empty(end - begin, dtype=dtype, device="cpu") for dtype in dtypes]
        placement = self._collectives.placement
        runs = shard_runs(placement, unit, slot, begin, end)
        run = runs[placement.shard_index]
        if run.start < run.stop:
            for piece in self._local.pieces_of_slot(unit, slot, begin + run.start, begin + run.stop, state):
                span = slice(piece.first - begin, piece.first - begin + piece.weight.numel())
                tensors = [piece.weight, piece.remainder, *(piece.states or ())]
                for output, part in zip(values, [part for part in tensors if part is not None], strict=True):
                    output[span].copy_(part)
        message = b"".join(bytes_of(output[run].view(torch.uint8)) for output in values)
        answers = self._collectives.all_gather_bytes(f"reading {slot.name}", message)
        join_runs(placement, runs, [bytes_tensor(answer) for answer in answers], values)
        weight, *states = values
        if not state:
            return Piece(begin, weight)
        if unit.remainder is None:
            return Piece(begin, weight, None, tuple(states))
        return Piece(begin, weight, states[0], tuple(states[1:]))


class FirstRankReader:
    """Reads stored parameters of all ranks, for the first rank.

    Args:
        stored: this rank's values; no transfer is in flight.
        relay: collectives of the ranks; all of them read the same parameters, in the same order.
        masters: read fp32 masters of trained parameters instead of weights.
    """

    def __init__(self, stored: StoredValues, relay: DeferringFailures, *, masters: bool) -> None:
        self._stored, self._relay, self._masters = stored, relay, masters

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        unit, _ = self._stored.slots_of(parameter)[0]
        return torch.float32 if self._masters and unit.trainable else unit.dtype

    def read_parameter(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """Its values in order, as 1-D tensors, on the first rank; nothing on the others. Raises StorageError."""
        placement = self._relay.placement
        if placement.shard_size == 1 and placement.rank:
            return
        dtype = self.dtype_of(parameter)
        for unit, slot in self._stored.slots_of(parameter):
            last = slot.first_numel + slot.numel
            for begin in range(slot.first_numel, last, CHUNK_NUMEL):
                end = min(begin + CHUNK_NUMEL, last)
                if placement.shard_size > 1:
                    yield from self._read_gathered(unit, slot, begin, end, dtype)
                    continue
                values = None
                with self._relay.deferring_failure():
                    values = self._read_local(unit, slot, begin, end, dtype)
                if values is not None:
                    yield values

    def _read_gathered(
        self, unit: Unit, slot: Slot, begin: int, end: int, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        placement = self._relay.placement
        runs = shard_runs(placement, unit, slot, begin, end)
        run, payload = runs[placement.shard_index], b""
        if run.start < run.stop and placement.rank < placement.shard_size:
            with self._relay.deferring_failure():
                values = self._read_local(unit, slot, begin + run.start, begin + run.stop, dtype)
                payload = bytes_of(values.view(torch.uint8))
        answers = self._relay.all_gather_results(f"reading {slot.name}", payload)
        if placement.rank == 0:
            output = torch.empty(end - begin, dtype=dtype, device="cpu")
            join_runs(placement, runs, [bytes_tensor(answer) for answer in answers], [output])
            yield output

    def _read_local(self, unit: Unit, slot: Slot, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(end - begin, dtype=dtype, device="cpu")
        for piece in self._stored.pieces_of_slot(unit, slot, begin, end, self._masters):
            piece.copy_into(values, begin)
        return values


def shard_runs(placement: Placement, unit: Unit, slot: Slot, begin: int, end: int) -> list[slice]:
    """Each shard's part of elements [begin, end) of a parameter in one slot of a unit, counted from `begin`."""
    first = slot.offset_numel - slot.first_numel  # position that the parameter's first element would have in the unit
    ends = [min(max(k * unit.shard_numel - first, begin), end) for k in range(placement.shard_size + 1)]
    return [slice(a - begin, b - begin) for a, b in pairwise(ends)]


def join_runs(
    placement: Placement, runs: Sequence[slice], payloads: list[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Copy every shard's run into each of `outputs`.

    Args:
        runs: from `shard_runs`.
        payloads: of each rank, bytes that begin with its runs, one tensor after the other; the others stay in the list.
        outputs: 1-D, on the host.
    """
    for run, rank in zip(runs, placement.shard_ranks, strict=True):
        for output in outputs:
            nbytes = (run.stop - run.start) * output.element_size()
            output[run].view(torch.uint8).copy_(payloads[rank][:nbytes])
            payloads[rank] = payloads[rank][nbytes:]


def agree_on_change(
    collectives: Collectives, model: nn.Module, trained_ids: Collection[int], *, accumulating: bool
) -> None:
    """Check that all ranks have changed their model alike, and that none has gradients. All ranks call this together.

    Raises StateError: names the differences, per rank; or the ranks that have gradients.

    Args:
        model: the changed model.
        trained_ids: id(parameter) of the parameters in param groups.
        accumulating: this rank has gradients that no step has used.
    """
    if collectives.placement.is_single_rank:
        return
    with torch._C.DisableTorchFunctionSubclass():
        lines = [
            f"{name} {list(p.shape)} {p.dtype}, {'trained' if id(p) in trained_ids else 'not trained'}"
            for name, p in model.named_parameters()
        ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    answers = [
        json.loads(answer)
        for answer in collectives.all_gather_bytes("a change", json.dumps([digest, accumulating]).encode())
    ]
    if len({digest for digest, _ in answers}) > 1:
        lists = [
            json.loads(answer) for answer in collectives.all_gather_bytes("what differs", json.dumps(lines).encode())
        ]
        raise StateError(
            f"the ranks have changed the model differently: {_differences(lists)}; make the same changes on each rank"
        )
    ranks = [rank for rank, (_, has_gradients) in enumerate(answers) if has_gradients]
    if ranks:
        raise StateError(
            f"the model has changed in the middle of a step: ranks {', '.join(map(str, ranks))} have gradients; with "
            "several ranks, change the model right after step(), or call zero_grad() first"
        )


def _differences(lists: list[list[str]]) -> str:
    common = set(lists[0]).intersection(*lists[1:])
    parts = []
    for rank, lines in enumerate(lists):
        extra = [line for line in lines if line not in common]
        more = f" and {len(extra) - SHOWN_MAX} more" if len(extra) > SHOWN_MAX else ""
        parts.append(f"rank {rank}: {'; '.join(extra[:SHOWN_MAX]) or 'nothing of its own'}{more}")
    return ", ".join(parts) if any(len(lines) != len(common) for lines in lists) else "the order of its parameters"
