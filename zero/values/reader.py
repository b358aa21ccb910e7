"""The one reader of an engine's parameters: as they are used now, or as they are stored, on this rank or on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise

import torch
from torch import nn

from offload.array.copies import read_array
from offload.errors import StateError
from offload.files.archives import bytes_of, bytes_tensor
from zero.cache.coordinator import Coordinator
from zero.params.binding import UnitBinding
from zero.params.layout import Layout, Placement, Slot, Unit
from zero.store.all_ranks import DeferringFailures
from zero.store.collectives import Collectives, gather_on_host
from zero.store.storage import Storage
from zero.store.stored_values import ParameterSlots, Piece, StoredValues

CHUNK_NUMEL = 1 << 20  # Elements per message; with their states, at most 14 bytes each.


class ValueReader:
    """Reads an engine's parameters outside forward and backward, wherever their values are.

    All ranks read the same parameters, in the same order, but for what `open_stored` reads.

    Attributes:
        parameters: the model's, by their index in the layout.
        slots: of the parameters, one for each tile.
    """

    def __init__(
        self,
        layout: Layout,
        bindings: list[UnitBinding],
        storage: Storage,
        coordinator: Coordinator,
        collectives: Collectives,
        parameters: list[nn.Parameter],
    ) -> None:
        self._layout = layout
        self._bindings = bindings
        self._storage = storage
        self._coordinator = coordinator
        self._collectives = collectives
        self.parameters = parameters
        self.slots: ParameterSlots = {}
        for unit in layout.units:
            for slot in unit.slots:
                self.slots.setdefault(id(parameters[slot.index]), []).append((unit, slot))

    # ---- as they are used ------------------------------------------------------------------------

    @torch.inference_mode(False)
    def read_unit(self, unit: Unit) -> torch.Tensor:
        """A copy of the unit's weights as uint8 in host memory."""
        live = self.live_weights(unit)
        if live is not None:
            return live.view(torch.uint8).cpu().clone()
        out = torch.empty(unit.nbytes, dtype=torch.uint8, device="cpu")
        array = self._storage.weights[self._layout.space_of(unit)]
        job = read_array(array, unit.begin, unit.end, unit.shard_of(out), self._storage.host_pool)
        self._storage.io_loop.run(f"reading {unit.name}", job)
        return gather_on_host(self._collectives, unit, out)

    def live_weights(self, unit: Unit) -> torch.Tensor | None:
        """The unit's weights as they are used: stored ones, or newer ones if forward has modified one in place.

        None: they are not bound, or other ranks have bound them at another time.
        """
        binding = self._bindings[unit.index]
        if not (binding.is_bound and (unit.persistent or self._collectives.placement.is_single_rank)):
            return None
        self._coordinator.use_on_current_stream(unit.index)
        recapture(binding)
        return binding.flat.detach()

    @torch.inference_mode(False)
    def weights(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        return self._read_copy(parameter, self.slots[id(parameter)][0][0].dtype, exact=False)

    @torch.inference_mode(False)
    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        return self._read_copy(parameter, torch.float32, exact=True)

    @torch.inference_mode(False)
    def states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of one parameter's states by name (Adam's are `exp_avg` and `exp_avg_sq`), fp32 on the host."""
        names = self._storage.plan.states_of(self.slots[id(parameter)][0][0])
        out = {key: torch.empty(parameter.numel(), dtype=torch.float32, device="cpu") for key in names}
        for piece in self._read_pieces(parameter, state=True):
            for number, values in enumerate(out.values()):
                piece.copy_into(values, state=number)
        return {key: value.view(parameter.shape) for key, value in out.items()}

    def _read_copy(self, parameter: nn.Parameter, dtype: torch.dtype, *, exact: bool) -> torch.Tensor:
        out = torch.empty(parameter.numel(), dtype=dtype, device="cpu")
        for piece in self._read_pieces(parameter, state=exact):
            piece.copy_into(out)
        return out.view(parameter.shape)

    def _read_pieces(self, parameter: nn.Parameter, *, state: bool) -> Iterator[Piece]:
        """The parameter's pieces, with their remainders and states if `state`; weights as they are used now."""
        with closing(self.open_gathered()) as stored:
            for unit, slot in self.slots[id(parameter)]:
                live = self.live_weights(unit)
                first, last = slot.first_numel, slot.first_numel + slot.numel
                weights = None if live is None else live[slot.offset_numel : slot.end_numel]
                if weights is not None and not (state and unit.trainable):
                    yield Piece(first, weights)
                    continue
                for piece in stored.pieces(parameter, first, last, state):
                    offset = piece.first - first
                    if weights is not None:
                        piece = piece._replace(weight=weights[offset : offset + piece.weight.numel()])
                    yield piece

    # ---- as they are stored: call these when no update is due and no transfer is in flight --------

    def open_stored(self, *, reads_few: bool = False) -> StoredValues:
        """The values that this rank stores; close it. `reads_few`: as there."""
        return StoredValues(self._layout, self._storage, self.slots, reads_few=reads_few)

    def open_gathered(self) -> GatheredValues:
        """The values that all ranks store, for few parameters; close it."""
        return GatheredValues(self.open_stored(reads_few=True), self._collectives)


class GatheredValues:
    """`StoredValues` of all ranks. All ranks read the same parameters, in the same order.

    `local`: the values that this rank stores.
    """

    def __init__(self, local: StoredValues, collectives: Collectives) -> None:
        self._local, self._collectives = local, collectives

    def pieces(self, parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterator[Piece]:
        """As `StoredValues.pieces`; with several shards on the host."""
        if self._collectives.placement.shard_size == 1:
            yield from self._local.pieces(parameter, begin, end, state)
            return
        for unit, slot in self._local.slots_of(parameter):
            first, last = max(begin, slot.first_numel), min(end, slot.first_numel + slot.numel)
            for lo in range(first, last, CHUNK_NUMEL):
                yield self._piece(unit, slot, lo, min(lo + CHUNK_NUMEL, last), state and unit.trainable)

    def close(self) -> None:
        """See `StoredValues.close`."""
        self._local.close()

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


def recapture(binding: UnitBinding) -> None:
    """Take over what user code has done to the parameters of a bound unit. Raises StateError: another shape."""
    refused = binding.recapture()
    if refused:
        raise StateError("; ".join(refused))
