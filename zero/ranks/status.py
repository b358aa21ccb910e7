"""The board on which ranks publish their positions: a few keys in the store of the process group.

A read never waits for another rank: a rank that has published nothing is left out.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zero.ranks.sequence import SequenceEntry

WORKS, FAILED, GONE = "works", "failed", "gone"


@dataclass(slots=True)
class Position:
    state: str = WORKS  # WORKS, FAILED, or GONE once it has closed its engine or ended.
    error: str = ""  # Why it has failed.
    lost: bool = False  # It failed because another rank has left.
    count: int = 0  # Number of entries in its log.
    last: str = "nothing"  # The last entry, in words.
    digests: list[tuple[int, str]] = field(default_factory=list)  # (count, digest) at some places of its log.
    # (place, what, seconds so far) of the collectives it is in, the oldest first.
    waits: list[tuple[int, str, float]] = field(default_factory=list)
    beat: int = 0  # Grows while the process lives.
    process_namespace: str = ""  # Host and PID namespace, in which `pid` is valid.
    pid: int = 0

    def __str__(self) -> str:
        if self.state == FAILED:
            return f"has failed: {self.error}"
        if self.state == GONE:
            return f"has closed its engine or ended; its last was {self.last}"
        if self.waits:
            _, what, seconds = self.waits[0]
            return f"has been in {what} for {seconds:.0f} s"
        return f"is in no collective; its last was {self.last}"


class StatusBoard:
    """One rank's view.

    Args:
        store: of torch, with a prefix for the engine's keys, and with a separate connection if possible.
        world_size: number of all ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._has_multi_get = bool(getattr(store, "has_extended_api", lambda: False)())
        self._error: Exception | None = None

    def publish_position(self, position: Position) -> None:
        self._call_store("set", f"zero/position/{self._rank}", json.dumps(asdict(position)))

    def positions(self, ranks: Sequence[int] | None = None) -> dict[int, Position]:
        """Positions of other ranks; None: of all others."""
        other_ranks = [rank for rank in (range(self._world_size) if ranks is None else ranks) if rank != self._rank]
        texts = self._read_keys([f"zero/position/{rank}" for rank in other_ranks])
        return {
            rank: Position(**json.loads(text))
            for rank, text in zip(other_ranks, texts, strict=True)
            if text is not None
        }

    def request_logs(self) -> int:
        """Request every rank's log; returns the number of this request."""
        return int(self._call_store("add", "zero/call", 1))

    def last_request(self) -> int:
        """The number of the last request; 0: none yet."""
        return int(self._call_store("add", "zero/call", 0))

    def publish_log(self, request: int, first: int, entries: Sequence[SequenceEntry]) -> None:
        """Publish the last entries of this rank's log, as an answer to that request."""
        text = json.dumps([request, first, entries])
        self._call_store("set", f"zero/log/{self._rank}", zlib.compress(text.encode()))

    def logs(self) -> dict[int, tuple[int, int, list[SequenceEntry]]]:
        """Rank -> (request, place of the first entry, entries), including this rank."""
        texts = self._read_keys([f"zero/log/{rank}" for rank in range(self._world_size)])
        logs = {rank: json.loads(zlib.decompress(text)) for rank, text in enumerate(texts) if text is not None}
        return {
            rank: (request, first, [SequenceEntry(*entry) for entry in entries])
            for rank, (request, first, entries) in logs.items()
        }

    def publish_connections(self, name: str, ends: Sequence[tuple[str, str]]) -> None:
        self._call_store("set", f"zero/ends/{name}/{self._rank}", json.dumps(ends))

    def connections(self, name: str) -> set[tuple[str, str]]:
        texts = self._read_keys([f"zero/ends/{name}/{rank}" for rank in range(self._world_size) if rank != self._rank])
        return {tuple(pair) for text in texts if text is not None for pair in json.loads(text)}

    def _read_keys(self, keys: list[str]) -> list[bytes | None]:
        if keys and self._call_store("check", keys):
            return (
                self._call_store("multi_get", keys)
                if self._has_multi_get
                else [self._call_store("get", key) for key in keys]
            )
        return [self._call_store("get", key) if self._call_store("check", [key]) else None for key in keys]

    def _call_store(self, operation: str, *arguments: Any) -> Any:
        """One call of the store. After a failure no further call is made: each would print the library's own errors."""
        if self._error is not None:
            raise self._error
        try:
            return getattr(self._store, operation)(*arguments)
        except Exception as error:
            self._error = error
            raise


def process_namespace() -> str:
    """Boot of a kernel and PID namespace: equal for processes that can see each other by process id.

    Not the host's name: nodes may have equal ones, and each kernel's first PID namespace has the same number.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def has_died(position: Position) -> bool:
    """True when the process has certainly ended. False: it is not known."""
    if not position.process_namespace or position.process_namespace != process_namespace():
        return False
    try:
        return bool(psutil.Process(position.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
