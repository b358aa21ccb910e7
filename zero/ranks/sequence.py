"""The agreed order: what each rank has decided to do with the others, numbered and hashed.

Every rank writes down each collective when it decides to do it. Ranks that run the same program write the same: equal
hashes at equal places. Where they differ, the entries themselves tell who did what. Collectives are launched by number,
whichever job is ready first.
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

from zero.ranks.failure import again

ENTRIES_KEPT = 2048
DIGEST_EVERY = 64  # Every so many entries the digest is kept, to be compared while nobody waits.
DIGESTS_KEPT = 32
DIGEST_BYTES = 8


class SequenceEntry(NamedTuple):
    """One thing that all ranks do together."""

    kind: str
    unit: int  # Index of the unit it is about; -1: none.
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of unit {self.unit} ({self.name})" if self.unit >= 0 else f"{self.kind} ({self.name})"


@dataclass(frozen=True)
class Ticket:
    """The place of one collective in the agreed order."""

    number: int  # Among the collectives of the mover; they are launched in this order.
    kind: str
    unit: int
    name: str
    place: int = field(default=0, repr=False)  # In the log of everything.
    digest: bytes = field(default=b"", repr=False)  # Of everything up to and with it.

    def __str__(self) -> str:
        return str(SequenceEntry(self.kind, self.unit, self.name))


class Log:
    """What this rank has decided so far. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[SequenceEntry] = deque(maxlen=ENTRIES_KEPT)
        self.count, self._digest = 0, b"\0" * DIGEST_BYTES
        self._digests: deque[tuple[int, str]] = deque(maxlen=DIGESTS_KEPT)
        self._tickets = 0

    def add(self, kind: str, unit: int, name: str) -> tuple[int, bytes]:
        """Write one down; returns its place and the digest of everything up to and with it."""
        with self._lock:
            return self._add(SequenceEntry(kind, unit, name))

    def ticket(self, kind: str, unit: int, name: str) -> Ticket:
        """Write a collective of the mover down."""
        with self._lock:
            place, digest = self._add(SequenceEntry(kind, unit, name))
            number, self._tickets = self._tickets, self._tickets + 1
            return Ticket(number, kind, unit, name, place, digest)

    def last(self) -> str:
        """The last entry in words, with its place."""
        with self._lock:
            return f"number {self.count - 1}, {self._kept[-1]}" if self._kept else "nothing"

    def digests(self) -> list[tuple[int, str]]:
        """(count, digest of so many entries) at regular places, and now."""
        with self._lock:
            return [*self._digests, (self.count, self._digest.hex())]

    def tail(self) -> tuple[int, list[SequenceEntry]]:
        """(place of the first one, the last ENTRIES_KEPT of them)."""
        with self._lock:
            return self.count - len(self._kept), list(self._kept)

    def _add(self, entry: SequenceEntry) -> tuple[int, bytes]:
        text = f"{entry.kind}\0{entry.unit}\0{entry.name}".encode()
        self._digest = hashlib.blake2b(self._digest + text, digest_size=DIGEST_BYTES).digest()
        self._kept.append(entry)
        self.count += 1
        if self.count % DIGEST_EVERY == 0:
            self._digests.append((self.count, self._digest.hex()))
        return self.count - 1, self._digest


class Order:
    """The next number to be launched, and who waits for theirs. The mover's loop only."""

    def __init__(self) -> None:
        self.next = 0
        self._passed: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._failure: BaseException | None = None

    async def turn(self, number: int) -> None:
        """Return once every smaller number has passed. Raises RankDivergenceError: what `fail` was told."""
        if self._failure is not None:
            raise again(self._failure)
        if number == self.next:
            return
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[number]
        finally:
            del self._waiting[number]

    def passed(self, number: int) -> None:
        """It is launched, or will never be."""
        self._passed.add(number)
        while self.next in self._passed:
            self._passed.discard(self.next)
            self.next += 1
        follower = self._waiting.get(self.next)
        if follower is not None and not follower.done():
            follower.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nothing is launched any more; who waits gets `error`."""
        self._failure = error
        for follower in self._waiting.values():
            if not follower.done():
                follower.set_exception(again(error))


HEADER = struct.Struct(f"<q{DIGEST_BYTES}s")


def pack_header(place: int, digest: bytes) -> bytes:
    """What ranks compare: HEADER.size bytes."""
    return HEADER.pack(place, digest)


def difference(tails: Mapping[int, tuple[int, Sequence[SequenceEntry]]]) -> str | None:
    """Where the logs of ranks first differ, in words; None while what they share is equal.

    `tails`: of each rank, what `Log.tail` gave there.
    """
    if len(tails) < 2:
        return None
    begin = max(first for first, _ in tails.values())
    ends = {rank: first + len(entries) for rank, (first, entries) in tails.items()}
    for place in range(begin, max(ends.values())):
        did = {rank: tails[rank][1][place - tails[rank][0]] for rank in tails if place < ends[rank]}
        if len(set(did.values())) > 1:
            behind = [rank for rank in tails if rank not in did]
            lines = [f"{_ranks(ranks)}: {entry}" for entry, ranks in _inverted(did).items()]
            lines += [f"{_ranks(behind)}: not so far yet"] if behind else []
            return f"they differ at number {place}: " + "; ".join(lines)
    return None


def _inverted(did: Mapping[int, SequenceEntry]) -> dict[SequenceEntry, list[int]]:
    by_entry: dict[SequenceEntry, list[int]] = {}
    for rank, entry in sorted(did.items()):
        by_entry.setdefault(entry, []).append(rank)
    return by_entry


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
