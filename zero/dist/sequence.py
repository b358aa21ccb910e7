"""The agreed order: the collectives that each rank has decided on, numbered and hashed.

Every rank logs each collective when it decides on it. Ranks that run the same program have the same log: equal hashes
at equal places. If the hashes differ, the entries show what each rank did. Collectives are launched in the order of
their numbers, even if a later job is ready first.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zero.dist.failure_state import copy_error

ENTRIES_MAX = 2048
DIGEST_EVERY = 64  # Every so many entries the digest is kept, so that ranks can compare them while none waits.
DIGESTS_MAX = 32
DIGEST_BYTES = 8


class SequenceEntry(NamedTuple):
    """One collective of all ranks."""

    kind: str
    unit: int  # Index of its unit; -1: none.
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of unit {self.unit} ({self.name})" if self.unit >= 0 else f"{self.kind} ({self.name})"


@dataclass(frozen=True)
class QueuedWork:
    """The place of one collective in the agreed order."""

    number: int  # Among the collectives of the I/O loop; they are launched in this order.
    kind: str
    unit: int
    name: str
    place: int = field(default=0, repr=False)  # In the log, which has other entries too.
    digest: bytes = field(default=b"", repr=False)  # Of all entries up to this one, inclusive.

    def __str__(self) -> str:
        return str(SequenceEntry(self.kind, self.unit, self.name))


class OperationLog:
    """The decisions of this rank so far. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[SequenceEntry] = deque(maxlen=ENTRIES_MAX)
        self.count, self._digest = 0, b"\0" * DIGEST_BYTES
        self._digests: deque[tuple[int, str]] = deque(maxlen=DIGESTS_MAX)
        self._queued_count = 0

    def add(self, kind: str, unit: int, name: str) -> tuple[int, bytes]:
        """Add an entry; returns its place and the digest of all entries up to it, inclusive."""
        with self._lock:
            return self._add(SequenceEntry(kind, unit, name))

    def add_queued(self, kind: str, unit: int, name: str) -> QueuedWork:
        """Add a collective of the I/O loop."""
        with self._lock:
            place, digest = self._add(SequenceEntry(kind, unit, name))
            number, self._queued_count = self._queued_count, self._queued_count + 1
            return QueuedWork(number, kind, unit, name, place, digest)

    def describe_last(self) -> str:
        """The last entry in words, with its place."""
        with self._lock:
            return f"number {self.count - 1}, {self._entries[-1]}" if self._entries else "nothing"

    def digests(self) -> list[tuple[int, str]]:
        """(count, digest of the first `count` entries) at regular places, and at the end."""
        with self._lock:
            return [*self._digests, (self.count, self._digest.hex())]

    def tail(self) -> tuple[int, list[SequenceEntry]]:
        """The last ENTRIES_MAX entries, as (place of the first of them, entries)."""
        with self._lock:
            return self.count - len(self._entries), list(self._entries)

    def _add(self, entry: SequenceEntry) -> tuple[int, bytes]:
        text = f"{entry.kind}\0{entry.unit}\0{entry.name}".encode()
        self._digest = hashlib.blake2b(self._digest + text, digest_size=DIGEST_BYTES).digest()
        self._entries.append(entry)
        self.count += 1
        if self.count % DIGEST_EVERY == 0:
            self._digests.append((self.count, self._digest.hex()))
        return self.count - 1, self._digest


class LaunchOrder:
    """The next number to be launched, and the tasks that wait for theirs. Only on the I/O loop."""

    def __init__(self) -> None:
        self.next = 0
        self._finished: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._failure: BaseException | None = None

    async def wait_until_next(self, number: int) -> None:
        """Return once every smaller number has been launched. Raises RankDivergenceError: the error from `fail`."""
        if self._failure is not None:
            raise copy_error(self._failure)
        if number == self.next:
            return
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[number]
        finally:
            del self._waiting[number]

    def advance_past(self, number: int) -> None:
        """Mark a number as launched, or as one that will never be launched."""
        self._finished.add(number)
        while self.next in self._finished:
            self._finished.discard(self.next)
            self.next += 1
        waiter = self._waiting.get(self.next)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Launch nothing any more; waiting tasks raise `error`."""
        self._failure = error
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(copy_error(error))


HEADER = struct.Struct(f"<q{DIGEST_BYTES}s")


def pack_header(place: int, digest: bytes) -> bytes:
    """The header that ranks compare: HEADER.size bytes."""
    return HEADER.pack(place, digest)


def describe_difference(tails: Mapping[int, tuple[int, Sequence[SequenceEntry]]]) -> str | None:
    """Where the logs of ranks first differ, in words; None while their common entries are equal.

    `tails`: rank -> result of its `OperationLog.tail`.
    """
    if len(tails) < 2:
        return None
    begin = max(first for first, _ in tails.values())
    ends = {rank: first + len(entries) for rank, (first, entries) in tails.items()}
    for place in range(begin, max(ends.values())):
        entry_of = {rank: tails[rank][1][place - tails[rank][0]] for rank in tails if place < ends[rank]}
        if len(set(entry_of.values())) > 1:
            behind = [rank for rank in tails if rank not in entry_of]
            lines = [f"{format_ranks(ranks)}: {entry}" for entry, ranks in _ranks_by_entry(entry_of).items()]
            lines += [f"{format_ranks(behind)}: not that far yet"] if behind else []
            return f"they differ at number {place}: " + "; ".join(lines)
    return None


def _ranks_by_entry(entry_of: Mapping[int, SequenceEntry]) -> dict[SequenceEntry, list[int]]:
    by_entry: dict[SequenceEntry, list[int]] = {}
    for rank, entry in sorted(entry_of.items()):
        by_entry.setdefault(entry, []).append(rank)
    return by_entry


def format_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
