"""The watchdog: a thread that publishes this rank's position for the others, and finds out why a wait does not end.

[Note: evidence] A rank may be slow for any length of time: it loads data, computes, saves. So a long wait alone is no
error, only a reason for a warning; the timeout of the process group ends it. These are proofs of an error:
- The logs of two ranks differ at some place. Such ranks can never agree again.
- A rank reports a failure, or has closed its engine, or its process has ended, before it reached the awaited place.
Every rank publishes its position all the time, and its log on request. A rank requests logs when it has waited for a
few seconds.

[Note: ending a wait] gloo has no way to cancel a message. Once it is certain that a message cannot arrive, this rank
publishes the reason on the board and shuts the connections: the waits end here and on the other ranks, which then read
the board.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from offload.accelerator import device_initializer
from offload.errors import RankDivergenceError, RankLostError
from offload.streams import MaybeEvent
from zero.dist.failure_state import FailureState
from zero.dist.sequence import OperationLog, SequenceEntry, describe_difference, format_ranks

# ---- status --------------------------------------------------------------------------------------------------------
# The board on which ranks publish their positions: a few keys in the store of the process group.
#
# A read never waits for another rank: a rank that has published nothing is left out.


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


logger = logging.getLogger("zero")

LOG_SECONDS = 5.0  # Limit of the wait for logs of other ranks once an error is certain.
EVIDENCE_SECONDS = 4.0  # Limit of the search for a lost connection's reason; failing ranks write to the board first.
COMPARE_SECONDS = 5.0  # Interval at which digests are compared with a neighbour's while there is no problem.
STORE_SECONDS = 5.0  # A store that has not answered for so long is treated as ended.


@dataclass(slots=True)
class Wait:
    """A collective that this rank is in."""

    place: int
    what: str
    since: float
    event: MaybeEvent = None  # For collectives on a device: complete when the collective is done.
    warned_at: float = 0.0


class Watchdog:
    """The watchdog of one engine on this rank.

    Args:
        failure_state: gets the error once there is proof.
        world_size: number of all ranks.
        deadline_seconds: after so long a wait is logged as a warning; the board is read after a tenth of it.
        abort: called once after a failure has been published: it ends the collectives in flight.
    """

    def __init__(
        self,
        board: StatusBoard,
        log: OperationLog,
        failure_state: FailureState,
        rank: int,
        world_size: int,
        deadline_seconds: float,
        abort: Callable[[], None],
    ) -> None:
        self._board = board
        self._log = log
        self._failure_state = failure_state
        self._rank = rank
        self._world_size = world_size
        self._deadline_seconds = deadline_seconds
        self._patience_seconds = min(3.0, deadline_seconds / 10)
        self._waits: dict[int, Wait] = {}
        self._keys = itertools.count()
        self._cause_requests: deque[tuple[BaseException, str, Future[BaseException]]] = deque()
        self._wake_event, self._is_stopped, self._has_aborted = threading.Event(), False, False
        self._answered_request, self._compared_at = 0, 0.0
        self._answered_at = time.monotonic()
        self._last_positions: dict[int, Position] = {}
        self._initial_positions: dict[int, Position] = {}
        self._position = Position(process_namespace=process_namespace(), pid=os.getpid())
        self._abort = abort
        self._enter_device = device_initializer()
        self._thread = threading.Thread(target=self._run_thread, name="zero-watch", daemon=True)
        self._publish()
        self._thread.start()

    # ---- any thread ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, place: int, what: str) -> Iterator[Wait]:
        """Inside, this rank is in a collective; if an event is set on the yielded `Wait`, until it is complete."""
        key, wait = next(self._keys), Wait(place, what, time.monotonic())
        self._waits[key] = wait
        try:
            yield wait
        finally:
            if wait.event is None:
                del self._waits[key]

    def find_cause(self, error: BaseException, what: str) -> Future[BaseException]:
        """Find out why `what` failed with `error` here. The result is the error to raise; it is then the failure of
        `failure_state`.
        """
        cause_future: Future[BaseException] = Future()
        self._cause_requests.append((error, what, cause_future))
        self._wake_event.set()
        if not self._thread.is_alive():
            self._answer_requests()
        return cause_future

    def set_initial_positions(self, positions: dict[int, Position]) -> None:
        """Set the processes of other ranks, as found when the groups were opened."""
        self._initial_positions = positions

    def ended_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that have closed their engine, or whose process has ended -> what is known about it.

        Blocks for an answer of the store, but for processes that are known to have died. If there is none, the first
        rank, which usually has the store, counts as ended.
        """
        initial = self._initial_positions
        dead = {rank: "its process has died" for rank in ranks if rank in initial and has_died(initial[rank])}
        if dead:
            return dead
        try:
            positions = self._board.positions(ranks)
        except Exception:
            return {rank: "and the store of the process group do not answer" for rank in ranks if rank == 0}
        ended = {rank: str(position) for rank, position in positions.items() if position.state == GONE}
        return ended | {rank: "its process has died" for rank in positions if has_died(positions[rank])}

    @property
    def is_waiting(self) -> bool:
        return bool(self._current_waits())

    def wait_until_idle(self, seconds: float) -> None:
        """Block until this rank is in no collective any more, or time is up."""
        end = time.monotonic() + seconds
        while self.is_waiting and time.monotonic() < end:
            time.sleep(0.01)

    def wake(self) -> None:
        """Publish a change at once, which other ranks should know."""
        self._wake_event.set()

    def stop(self) -> None:
        """Publish that this rank has left, and end the thread. Idempotent."""
        self._is_stopped = True
        self._wake_event.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STORE_SECONDS)

    # ---- the thread ---------------------------------------------------------------------------

    def _run_thread(self) -> None:
        with contextlib.suppress(Exception):  # a failing device is reported by the thread that waits for it
            self._enter_device()
        while not self._is_stopped:
            self._wake_event.wait(self._patience_seconds / 3)
            self._wake_event.clear()
            self._run_round()
            self._answer_requests()
        with contextlib.suppress(Exception):
            self._publish()
        self._answer_requests()

    def _run_round(self) -> None:
        """One round. A store that does not answer is an error only while this rank waits for other ranks."""
        try:
            self._publish_and_abort()
            if self._failure_state.failure is None and not self._is_stopped:
                self._search_failure()
            self._answered_at = time.monotonic()
        except Exception as error:
            silent = time.monotonic() - self._answered_at
            if self._long_waits() and silent > STORE_SECONDS and self._failure_state.failure is None:
                self._failure_state.fail(self._silent_store_error(f"{self._long_waits()[0].what} does not end", error))
                self._abort_once()

    def _publish(self) -> None:
        """Publish the position; also the log, if another rank has requested it or after a failure or the end."""
        position, failure = self._position, self._failure_state.failure
        now, waits = time.monotonic(), self._current_waits()
        position.state = FAILED if failure is not None else GONE if self._is_stopped else WORKS
        position.error = "" if failure is None else str(failure)
        position.lost = isinstance(failure, RankLostError)
        position.count = self._log.count
        position.last = self._log.describe_last()
        position.digests = self._log.digests()
        position.waits = [(wait.place, wait.what, round(now - wait.since, 1)) for wait in waits[:3]]
        position.beat += 1
        self._board.publish_position(position)
        request = self._board.last_request()
        if request != self._answered_request or failure is not None or self._is_stopped:
            self._answered_request = request
            self._board.publish_log(request, *self._log.tail())

    def _publish_and_abort(self) -> None:
        """Publish; after a failure end this rank's connections too, also if the store does not answer any more."""
        try:
            self._publish()
        finally:
            self._abort_once()

    def _abort_once(self) -> None:
        if self._failure_state.failure is not None and not self._has_aborted:
            self._has_aborted = True
            with contextlib.suppress(Exception):
                self._abort()

    def _current_waits(self) -> list[Wait]:
        for key, wait in list(self._waits.items()):
            try:
                is_complete = wait.event is not None and wait.event.query()
            except Exception as error:  # the device failed: its events will never be complete; no other rank is why
                self._failure_state.fail(
                    RankLostError(f"rank {self._rank}: {wait.what}: its device failed: {type(error).__name__}: {error}")
                )
                is_complete = True
            if is_complete:
                self._waits.pop(key, None)
        return sorted(list(self._waits.values()), key=lambda wait: wait.since)

    def _long_waits(self) -> list[Wait]:
        now = time.monotonic()
        return [wait for wait in self._current_waits() if now - wait.since > self._patience_seconds]

    def _search_failure(self) -> None:
        """Look for proof that a wait will not end, or that the ranks' logs differ."""
        now, blocked, failure = time.monotonic(), self._long_waits(), None
        if blocked:
            self._board.request_logs()
            positions = self._other_positions()
            failure = self._find_lost_rank(positions, blocked[0]) or self._compare_logs(positions)
            if failure is None:
                self._warn_if_long(positions, blocked[0])
        elif now - self._compared_at > COMPARE_SECONDS:
            self._compared_at = now
            failure = self._compare_digests(self._board.positions([(self._rank + 1) % self._world_size]))
        if failure is not None:
            self._failure_state.fail(failure)
            self._publish_and_abort()

    def _other_positions(self) -> dict[int, Position]:
        """The position of each other rank; if it has published nothing, that from `set_initial_positions`, if any."""
        return {**self._initial_positions, **self._board.positions()}

    def _find_lost_rank(self, positions: dict[int, Position], wait: Wait) -> RankDivergenceError | None:
        """An error if a rank will never reach the place where this one waits."""
        waited = time.monotonic() - wait.since
        for rank, position in positions.items():
            if position.state == FAILED:
                return self._error_of(rank, position, wait.what)
            is_too_late = position.count <= wait.place or waited > 3 * self._patience_seconds
            if is_too_late and (position.state == GONE or has_died(position)):
                if position.state != GONE:
                    position.error, position.state = "its process has died", FAILED
                position.lost = True
                return self._error_of(rank, position, wait.what)
        return None

    def _error_of(self, rank: int, position: Position, what: str) -> RankDivergenceError:
        if position.state == FAILED and position.error.startswith(("rank", "ranks")):
            kind = RankLostError if position.lost else RankDivergenceError
            return kind(position.error)  # it already names the ranks
        return RankLostError(f"rank {self._rank} waits in {what}; rank {rank} {position}")

    def _compare_logs(self, positions: dict[int, Position]) -> RankDivergenceError | None:
        """An error if published logs differ."""
        tails = {rank: (first, entries) for rank, (_, first, entries) in self._board.logs().items()}
        tails[self._rank] = self._log.tail()
        difference = describe_difference(tails)
        if difference is not None:
            return RankDivergenceError(self._describe_divergence(difference, positions))
        return self._compare_digests(positions)

    def _compare_digests(self, positions: dict[int, Position]) -> RankDivergenceError | None:
        """An error if digests differ."""
        own = dict(self._log.digests())
        if any(own.get(count, digest) != digest for p in positions.values() for count, digest in p.digests):
            return self._divergence_error(f"rank {self._rank}", RuntimeError("the ranks have run different operations"))
        return None

    def _describe_divergence(self, difference: str, positions: dict[int, Position]) -> str:
        now = "; ".join(f"rank {rank} {position}" for rank, position in sorted(positions.items()))
        return f"ranks no longer run the same operations: {difference}" + (f". Now: {now}" if now else "")

    def _warn_if_long(self, positions: dict[int, Position], wait: Wait) -> None:
        now = time.monotonic()
        if now - max(wait.since, wait.warned_at) < self._deadline_seconds:
            return
        wait.warned_at = now
        behind = {rank: p for rank, p in positions.items() if p.count <= wait.place or not p.waits}
        descriptions = []
        for rank, position in sorted((behind or positions).items()):
            last_position = self._last_positions.get(rank)
            is_silent = last_position is not None and last_position.beat == position.beat
            descriptions.append(f"rank {rank} {position}" + (" and does not respond" if is_silent else ""))
        self._last_positions = positions
        others = "; ".join(descriptions)
        logger.warning("rank %d has waited %.0f s in %s: %s", self._rank, now - wait.since, wait.what, others)

    def _answer_requests(self) -> None:
        while self._cause_requests:
            error, what, cause_future = self._cause_requests.popleft()
            if self._failure_state.failure is None:
                try:
                    final = self._search_cause(error, what)
                except Exception as silence:
                    final = self._silent_store_error(f"{what} failed: {error}", silence)
                self._failure_state.fail(final)
            with contextlib.suppress(Exception):
                self._publish()
            self._abort_once()
            cause_future.set_result(self._failure_state.failure or error)

    def _search_cause(self, error: BaseException, what: str) -> BaseException:
        """Look for the cause of an error until it is found or time is up."""
        if isinstance(error, RankDivergenceError):
            return self._divergence_error(f"rank {self._rank}, {what}", error)
        first_positions = self._other_positions()
        end, wait = time.monotonic() + EVIDENCE_SECONDS, Wait(self._log.count, what, 0.0)
        self._board.request_logs()
        while True:
            self._publish()
            positions = self._other_positions()
            cause = self._find_lost_rank(positions, wait) or self._compare_logs(positions)
            if cause is not None:
                return cause
            if time.monotonic() > end or self._is_stopped:
                break
            time.sleep(0.2)
        silent = [
            rank for rank, p in positions.items() if rank in first_positions and first_positions[rank].beat == p.beat
        ]
        unknown = [rank for rank in range(self._world_size) if rank != self._rank and rank not in positions]
        evidence = f"no response from {format_ranks(silent)}" if silent else "the other ranks are alive"
        evidence += f", and nothing is known about {format_ranks(unknown)}" if unknown else ""
        others = "; ".join(f"rank {rank} {position}" for rank, position in sorted(positions.items()))
        return RankLostError(f"rank {self._rank}: {what} failed: {error}; {evidence}: {others}")

    def _silent_store_error(self, what: str, silence: BaseException) -> RankLostError:
        dead = [rank for rank, position in sorted(self._initial_positions.items()) if has_died(position)]
        evidence = f"{format_ranks(dead)}: process has died" if dead else "the state of the other ranks is not known"
        return RankLostError(
            f"rank {self._rank}: {what}; {evidence}: the store of the process group (in rank 0 or the launcher) does "
            f"not answer: {str(silence).splitlines()[0]}"
        )

    def _divergence_error(self, where: str, error: BaseException) -> RankDivergenceError:
        """The error, with the entries of each rank where the logs first differ."""
        request, end = self._board.request_logs(), time.monotonic() + LOG_SECONDS
        tails = {}
        while True:
            self._publish()
            logs = self._board.logs()
            tails = {rank: (first, entries) for rank, (_, first, entries) in logs.items()}
            fresh = [rank for rank, (answered_request, _, _) in logs.items() if answered_request >= request]
            difference = describe_difference(tails)
            if difference is not None or time.monotonic() > end:
                break
            if len(fresh) == self._world_size:
                break
            time.sleep(0.05)
        if difference is None:
            return RankDivergenceError(f"{where}: {error}; the first difference is too old to be in the logs")
        return RankDivergenceError(self._describe_divergence(difference, self._board.positions()))
