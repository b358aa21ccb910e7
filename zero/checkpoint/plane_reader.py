"""Parameters read out of the planes of all ranks, and what makes ranks that do so fail together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload.errors import StateError, StorageError, ZeroInfinityError
from offload.kernels import masters
from offload.memory.byte_tensors import bytes_of, tensor_of
from zero.exchange.exchange import Exchange
from zero.params.layout import Slot, Unit
from zero.store.adoption import Piece
from zero.store.stored_values import StoredValues
from zero.values.gathered_values import runs_of

CHUNK_NUMEL = 1 << 20
"""Elements in hand at once."""
GOOD, FAILED = b"\0", b"\1"


class Relay:
    """Ranks that work together fail together: what one cannot read or write, all are told of.

    Args:
        exchange: with the other ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.placement = exchange, exchange.placement
        self._failure: Exception | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A failure inside is raised on all ranks, by the next `exchange`."""
        try:
            yield
        except (ZeroInfinityError, OSError, MemoryError) as error:
            self._failure = self._failure or error
            if self.placement.alone:
                raise

    @property
    def failed(self) -> bool:
        """True once this rank's own work has."""
        return self._failure is not None

    def exchange(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises:
            StorageError, StateError: another rank has failed; names it. This one's own failure is raised as it is.
        """
        if self.placement.alone:
            return [payload]
        answers = self._exchange.agree(what, GOOD + payload if self._failure is None else _told(self._failure))
        for rank, answer in enumerate(answers):
            if answer[:1] == FAILED and self._failure is None:
                raise _heard(rank, answer[1:])
        if self._failure is not None:
            raise self._failure
        return [answer[1:] for answer in answers]


class PlaneReader:
    """Parameters out of the planes of all ranks, for the first one.

    Args:
        stored: this rank's planes, at rest.
        relay: with the other ranks; all of them read the same, in the same order.
        masters: the fp32 masters of what is trained, instead of weights.
    """

    def __init__(self, stored: StoredValues, relay: Relay, *, masters: bool) -> None:
        self._stored, self._relay, self._masters = stored, relay, masters

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What `read` gives."""
        unit, _ = self._stored.places_of(parameter)[0]
        return torch.float32 if self._masters and unit.trainable else unit.dtype

    def read(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """Its values from first to last, 1-D, on the first rank; nothing on others. Raises StorageError."""
        placement = self._relay.placement
        if placement.shard_size == 1 and placement.rank:
            return
        dtype = self.dtype_of(parameter)
        for unit, slot in self._stored.places_of(parameter):
            last = slot.first_numel + slot.numel
            for begin in range(slot.first_numel, last, CHUNK_NUMEL):
                end = min(begin + CHUNK_NUMEL, last)
                if placement.shard_size > 1:
                    yield from self._gathered(unit, slot, begin, end, dtype)
                    continue
                values = None
                with self._relay.keeping():
                    values = self._own(unit, slot, begin, end, dtype)
                if values is not None:
                    yield values

    def _gathered(self, unit: Unit, slot: Slot, begin: int, end: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        placement = self._relay.placement
        runs = runs_of(placement, unit, slot, begin, end)
        own, payload = runs[placement.shard_index], b""
        if own.start < own.stop and placement.rank < placement.shard_size:
            with self._relay.keeping():
                values = self._own(unit, slot, begin + own.start, begin + own.stop, dtype)
                payload = bytes_of(values.view(torch.uint8))
        answers = self._relay.exchange(f"reading {slot.name}", payload)
        if placement.rank == 0:
            for rank in placement.shard_ranks:
                if answers[rank]:
                    yield tensor_of(answers[rank]).view(dtype)

    def _own(self, unit: Unit, slot: Slot, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements that are in this rank's slice."""
        values = torch.empty(end - begin, dtype=dtype)
        for piece in self._stored.pieces_of_slot(unit, slot, begin, end, self._masters):
            _exact(values[piece.first - begin : piece.first - begin + piece.weight.numel()], piece)
        return values


def _exact(out: torch.Tensor, piece: Piece) -> None:
    """The fp32 master where the piece has what it takes; else its weight."""
    masters.whole(out, piece.weight.cpu(), None if piece.remainder is None else piece.remainder.cpu())


def _told(failure: Exception) -> bytes:
    place = [failure.errno, failure.path, failure.offset] if isinstance(failure, StorageError) else None
    return FAILED + json.dumps([f"{type(failure).__name__}: {failure}", place]).encode()


def _heard(rank: int, message: bytes) -> ZeroInfinityError:
    text, place = json.loads(message)
    said = f"rank {rank} has failed ({text})"
    if place is None:
        return StateError(said)
    errno, path, offset = place
    return StorageError(said, errno=errno, path=path, offset=offset, free_bytes=None)
