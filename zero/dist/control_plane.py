"""Blocking collectives of all ranks: gathering bytes, and broadcasting tensors from one rank.

It has its own process group, so it is independent of the I/O loop's collectives in flight. Each call begins with the
place in the log and its hash: ranks that have decided differently notice it before any value is used.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offload.errors import RankDivergenceError
from offload.files.archives import bytes_of, bytes_tensor
from zero.dist import backend
from zero.dist.failure_state import FailureState
from zero.dist.sequence import HEADER, OperationLog, pack_header

CHUNK_BYTES = 64 << 20  # Largest message of a broadcast.
INLINE_BYTES = 480  # A payload of `all_gather_bytes` up to this size is sent with its header.
LENGTH = struct.Struct("<q")

# (error of the backend, what failed) -> the error to raise instead. Blocks until more is known.
Explain: TypeAlias = Callable[[BaseException, str], BaseException]


class ControlPlane:
    """This rank's control plane. Called on any thread that may block; all ranks make the same calls in the same order.

    Args:
        handle: a gloo group of the members; None for one rank.
        log: gets an entry for each call.
        failure_state: checked before and while waiting.
        waiting: makes the context for a wait at a place of the log, with words for messages.
        explain: see `Explain`.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        handle: Any,
        log: OperationLog,
        failure_state: FailureState,
        waiting: Callable[[int, str], AbstractContextManager[Any]],
        explain: Explain,
    ) -> None:
        self._members, self._rank, self._handle = members, rank, handle
        self._log = log
        self._failure_state = failure_state
        self._waiting = waiting
        self._explain = explain
        self._lock = threading.Lock()

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""
        self._failure_state.raise_if_failed()
        if len(self._members) == 1:
            return [payload]
        with self._lock:
            return self._gather_payloads("agree", what, payload)

    def broadcast(self, tensors: Sequence[Tensor], source_rank: int) -> None:
        """Fill tensors with the values of `source_rank`; their shapes and dtypes are equal on all ranks."""
        self._failure_state.raise_if_failed()
        if len(self._members) == 1:
            return
        with self._lock, torch.no_grad():
            shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
            self._gather_payloads("broadcast", f"from rank {source_rank}: {shapes}", b"")
            for batch in _batches(tensors):
                self._broadcast_batch(batch, source_rank)

    def _gather_payloads(self, kind: str, what: str, payload: bytes) -> list[bytes]:
        place, digest = self._log.add(kind, -1, what)
        description = f"{kind} ({what if len(what) < 100 else what[:100] + '...'})"
        fits = len(payload) <= INLINE_BYTES
        head = pack_header(place, digest) + LENGTH.pack(len(payload))
        with self._waiting(place, description):
            message = head + (payload if fits else b"").ljust(INLINE_BYTES, b"\0")
            answers = self._gather_messages(description, message)
            if any(answer[: HEADER.size] != head[: HEADER.size] for answer in answers):
                raise self._explain(RankDivergenceError("the ranks have run different operations so far"), description)
            lengths = [LENGTH.unpack_from(answer, HEADER.size)[0] for answer in answers]
            inline = [answer[len(head) : len(head) + length] for answer, length in zip(answers, lengths, strict=True)]
            if max(lengths) <= INLINE_BYTES:
                return inline
            return self._gather_long_payloads(description, payload, inline, lengths)

    def _gather_long_payloads(
        self, description: str, payload: bytes, inline: list[bytes], lengths: list[int]
    ) -> list[bytes]:
        """All payloads, of which some did not fit beside their headers: `inline` has the others.

        Each of these is broadcast: often one rank has all the bytes, and a gather would make all of them send as many.
        Payloads of about the same length, and short, are gathered in one message.
        """
        longest = max(lengths)
        if longest < backend.BROADCAST_BYTES_MIN and 2 * sum(lengths) > longest * len(lengths):
            messages = self._gather_messages(description, payload.ljust(longest, b"\0"))
            return [message[:length] for message, length in zip(messages, lengths, strict=True)]
        received = {
            rank: bytes_tensor(payload) if rank == self._rank else torch.empty(length, dtype=torch.uint8, device="cpu")
            for rank, length in enumerate(lengths)
            if length > INLINE_BYTES
        }
        parts = [(part, rank) for rank, flat in received.items() for part in backend.split_flat(flat, CHUNK_BYTES)]
        self._run_works(description, partial(self._start_broadcasts, parts))
        return [bytes_of(received[rank]) if rank in received else message for rank, message in enumerate(inline)]

    def _gather_messages(self, description: str, message: bytes) -> list[bytes]:
        """Messages of one size, in rank order."""
        own = bytes_tensor(message)
        gathered = torch.empty(len(self._members) * len(message), dtype=torch.uint8, device="cpu")
        self._run_works(description, lambda: [backend.all_gather(gathered, own, self._handle)])
        return [bytes_of(part) for part in backend.split_flat(gathered, len(message))]

    def _start_broadcasts(self, parts: Sequence[tuple[Tensor, int]]) -> list[Any]:
        """Begin a broadcast of each tensor, from the rank beside it."""
        return [backend.broadcast(part, self._members[rank], self._handle) for part, rank in parts]

    def _run_works(self, description: str, start: Callable[[], list[Any]]) -> None:
        try:
            for work in start():
                backend.wait_for_work(work, self._failure_state.raise_if_failed)
        except BaseException as error:
            raise self._explain(error, description) from error

    def _broadcast_batch(self, batch: list[Tensor], source_rank: int) -> None:
        message = torch.cat([backend.as_bytes(tensor.contiguous()).cpu() for tensor in batch])
        with self._waiting(self._log.count - 1, f"broadcast (from rank {source_rank})"):
            for part in backend.split_flat(message, CHUNK_BYTES):
                self._run_works(
                    f"broadcast from rank {source_rank}", partial(self._start_broadcasts, [(part, source_rank)])
                )
        if self._rank == source_rank:
            return
        position = 0
        for tensor in batch:
            received = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
            backend.as_bytes(received).copy_(message[position : position + tensor.nbytes])
            tensor.copy_(received)
            position += tensor.nbytes


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive tensors of at most CHUNK_BYTES together; a larger one is alone."""
    batches: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if not batches or tensor.nbytes > room:
            batches.append([])
            room = CHUNK_BYTES
        batches[-1].append(tensor)
        room -= tensor.nbytes
    return batches
