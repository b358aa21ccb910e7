"""The watch: a thread that publishes this rank's position for the others, and finds out why a wait does not end.

[Note: evidence] A rank may be slow for any length of time: it loads data, computes, saves. So a long wait alone is no
error, only a reason for a warning; the timeout of the process group ends it. These are proofs of an error:
- The logs of two ranks differ at some place. Such ranks can never agree again.
- A rank reports a failure, or has closed its engine, or its process has ended, before it reached the awaited place.
Every rank publishes its position all the time, and its log on request. A rank requests logs when it has waited for a
few seconds.

[Note: ending a wait] gloo has no way to cancel a message. Once it is certain that a message cannot arrive, this rank
publishes the reason on the board and shuts the connections: the waits end here and on the other ranks, which then look
at the board.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from offload.accelerator import device_initializer
from offload.errors import RankDivergenceError, RankLostError
from offload.streams import MaybeEvent
from zero.ranks.failure import Fate
from zero.ranks.sequence import Log, difference, ranks_in_words
from zero.ranks.status import FAILED, GONE, WORKS, Position, StatusBoard, has_died, home

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
    fence: MaybeEvent = None  # For collectives on a device: passed when the collective is done.
    warned: float = 0.0


class Watch:
    """The watch of one engine on this rank.

    Args:
        fate: ended with the error once there is proof.
        world_size: number of all ranks.
        deadline_seconds: after so long a wait is logged as a warning; the board is read after a tenth of it.
        cut: called once after a failure has been published: it ends the collectives in flight.
    """

    def __init__(
        self,
        board: StatusBoard,
        log: Log,
        fate: Fate,
        rank: int,
        world_size: int,
        deadline_seconds: float,
        cut: Callable[[], None],
    ) -> None:
        self._board, self._log, self._fate, self._rank, self._world_size = board, log, fate, rank, world_size
        self._deadline_seconds = deadline_seconds
        self._patience_seconds = min(3.0, deadline_seconds / 10)
        self._waits: dict[int, Wait] = {}
        self._keys = itertools.count()
        self._questions: deque[tuple[BaseException, str, Future[BaseException]]] = deque()
        self._wake, self._stopped, self._broken = threading.Event(), False, False
        self._called, self._compared = 0, 0.0
        self._answered = time.monotonic()
        self._seen: dict[int, Position] = {}
        self._met: dict[int, Position] = {}
        self._self = Position(home=home(), pid=os.getpid())
        self._cut = cut
        self._enter = device_initializer()
        self._thread = threading.Thread(target=self._run, name="zero-watch", daemon=True)
        self._tell()
        self._thread.start()

    # ---- any thread ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, place: int, what: str) -> Iterator[Wait]:
        """Inside, this rank is in a collective. If a fence is set on the yielded `Wait`, until the fence is passed."""
        key, wait = next(self._keys), Wait(place, what, time.monotonic())
        self._waits[key] = wait
        try:
            yield wait
        finally:
            if wait.fence is None:
                del self._waits[key]

    def ask(self, error: BaseException, what: str) -> Future[BaseException]:
        """Ask why `what` failed with `error` here. The result is the error to raise; by then it has ended the fate."""
        question: Future[BaseException] = Future()
        self._questions.append((error, what, question))
        self._wake.set()
        if not self._thread.is_alive():
            self._answer_all()
        return question

    def meet(self, others: dict[int, Position]) -> None:
        """Take the processes of other ranks, as found when they met."""
        self._met = others

    def gone(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that have closed their engine, or whose process has ended, and what is known of it.

        Blocks for an answer of the store. Where there is none, the first rank, which has it, counts as gone.
        """
        dead = {rank: "its process has died" for rank in ranks if rank in self._met and has_died(self._met[rank])}
        if dead:
            return dead
        try:
            positions = self._board.positions(ranks)
        except Exception:
            return {rank: "and the store of the process group do not answer" for rank in ranks if rank == 0}
        return {rank: str(position) for rank, position in positions.items() if position.state == GONE}

    @property
    def under_way(self) -> bool:
        return bool(self._in_progress())

    def wait(self, seconds: float) -> None:
        """Block until this rank is in no collective any more, or time is up."""
        end = time.monotonic() + seconds
        while self.under_way and time.monotonic() < end:
            time.sleep(0.01)

    def tell_soon(self) -> None:
        """Publish a change at once, which other ranks should know."""
        self._wake.set()

    def stop(self) -> None:
        """Publish that this rank has left, and end the thread. Idempotent."""
        self._stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STORE_SECONDS)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a failing device is reported by the thread that waits for it
            self._enter()
        while not self._stopped:
            self._wake.wait(self._patience_seconds / 3)
            self._wake.clear()
            self._guarded()
            self._answer_all()
        with contextlib.suppress(Exception):
            self._tell()
        self._answer_all()

    def _guarded(self) -> None:
        """One round. A store that does not answer is an error only while this rank waits for other ranks."""
        try:
            self._tell()
            self._break()
            if self._fate.failure is None and not self._stopped:
                self._look()
            self._answered = time.monotonic()
        except Exception as error:
            silent = time.monotonic() - self._answered
            if self._blocked() and silent > STORE_SECONDS and self._fate.failure is None:
                self._fate.end(self._without_board(f"{self._blocked()[0].what} does not end", error))
                self._break()

    def _tell(self) -> None:
        """Publish the position; also the log, if another rank has requested it or after a failure or the end."""
        position, failure = self._self, self._fate.failure
        now, waits = time.monotonic(), self._in_progress()
        position.state = FAILED if failure is not None else GONE if self._stopped else WORKS
        position.error = "" if failure is None else str(failure)
        position.lost = isinstance(failure, RankLostError)
        position.count, position.last, position.digests = self._log.count, self._log.last(), self._log.digests()
        position.waits = [(wait.place, wait.what, round(now - wait.since, 1)) for wait in waits[:3]]
        position.beat += 1
        self._board.tell(position)
        called = self._board.called()
        if called != self._called or failure is not None or self._stopped:
            self._called = called
            self._board.tell_log(called, *self._log.tail())

    def _break(self) -> None:
        if self._fate.failure is not None and not self._broken:
            self._broken = True
            with contextlib.suppress(Exception):
                self._cut()

    def _in_progress(self) -> list[Wait]:
        for key, wait in list(self._waits.items()):
            try:
                passed = wait.fence is not None and wait.fence.query()
            except Exception as error:  # the device failed: none of its fences will be passed; no other rank is why
                self._fate.end(
                    RankLostError(f"rank {self._rank}: {wait.what}: its device failed: {type(error).__name__}: {error}")
                )
                passed = True
            if passed:
                self._waits.pop(key, None)
        return sorted(list(self._waits.values()), key=lambda wait: wait.since)

    def _blocked(self) -> list[Wait]:
        now = time.monotonic()
        return [wait for wait in self._in_progress() if now - wait.since > self._patience_seconds]

    def _look(self) -> None:
        """Look for proof that a wait will not end, or that the ranks' logs differ."""
        now, blocked, found = time.monotonic(), self._blocked(), None
        if blocked:
            self._board.call()
            positions = self._others()
            found = self._lost(positions, blocked[0]) or self._parted(positions)
            if found is None:
                self._warn(positions, blocked[0])
        elif now - self._compared > COMPARE_SECONDS:
            self._compared = now
            found = self._differing(self._board.positions([(self._rank + 1) % self._world_size]))
        if found is not None:
            self._fate.end(found)
            self._tell()
            self._break()

    def _others(self) -> dict[int, Position]:
        """The position of each other rank; of one that has published nothing, the position from `meet`, if any."""
        return {**self._met, **self._board.positions()}

    def _lost(self, positions: dict[int, Position], wait: Wait) -> RankDivergenceError | None:
        """An error if a rank will never reach the place where this one waits."""
        waited = time.monotonic() - wait.since
        for rank, position in positions.items():
            if position.state == FAILED:
                return self._because(rank, position, wait.what)
            never = position.count <= wait.place or waited > 3 * self._patience_seconds
            if never and (position.state == GONE or has_died(position)):
                if position.state != GONE:
                    position.error, position.state = "its process has died", FAILED
                position.lost = True
                return self._because(rank, position, wait.what)
        return None

    def _because(self, rank: int, position: Position, what: str) -> RankDivergenceError:
        if position.state == FAILED and position.error.startswith(("rank", "ranks")):
            kind = RankLostError if position.lost else RankDivergenceError
            return kind(position.error)  # it already names the ranks
        return RankLostError(f"rank {self._rank} waits in {what}; rank {rank} {position}")

    def _parted(self, positions: dict[int, Position]) -> RankDivergenceError | None:
        """An error if published logs differ."""
        tails = {rank: (first, entries) for rank, (_, first, entries) in self._board.logs().items()}
        tails[self._rank] = self._log.tail()
        found = difference(tails)
        if found is not None:
            return RankDivergenceError(self._sentence(found, positions))
        return self._differing(positions)

    def _differing(self, positions: dict[int, Position]) -> RankDivergenceError | None:
        """An error if digests differ."""
        own = dict(self._log.digests())
        if any(own.get(count, digest) != digest for p in positions.values() for count, digest in p.digests):
            return self._named(f"rank {self._rank}", RuntimeError("the ranks have run different operations"))
        return None

    def _sentence(self, found: str, positions: dict[int, Position]) -> str:
        now = "; ".join(f"rank {rank} {position}" for rank, position in sorted(positions.items()))
        return (
            f"ranks no longer run the same operations: {found}. Now: {now}"
            if now
            else f"ranks no longer run the same operations: {found}"
        )

    def _warn(self, positions: dict[int, Position], wait: Wait) -> None:
        now = time.monotonic()
        if now - max(wait.since, wait.warned) < self._deadline_seconds:
            return
        wait.warned = now
        behind = {rank: p for rank, p in positions.items() if p.count <= wait.place or not p.waits}
        told = []
        for rank, position in sorted((behind or positions).items()):
            before = self._seen.get(rank)
            silent = before is not None and before.beat == position.beat
            told.append(f"rank {rank} {position}" + (" and does not respond" if silent else ""))
        where, self._seen = "; ".join(told), positions
        logger.warning("rank %d has waited %.0f s in %s: %s", self._rank, now - wait.since, wait.what, where)

    def _answer_all(self) -> None:
        while self._questions:
            error, what, question = self._questions.popleft()
            if self._fate.failure is None:
                try:
                    final = self._explain(error, what)
                except Exception as silence:
                    final = self._without_board(f"{what} failed: {error}", silence)
                self._fate.end(final)
            with contextlib.suppress(Exception):
                self._tell()
            self._break()
            question.set_result(self._fate.failure or error)

    def _explain(self, error: BaseException, what: str) -> BaseException:
        """Look for the cause of an error until it is found or time is up."""
        if isinstance(error, RankDivergenceError):
            return self._named(f"rank {self._rank}, {what}", error)
        begin = self._others()
        end, wait = time.monotonic() + EVIDENCE_SECONDS, Wait(self._log.count, what, 0.0)
        self._board.call()
        while True:
            self._tell()
            positions = self._others()
            found = self._lost(positions, wait) or self._parted(positions)
            if found is not None:
                return found
            if time.monotonic() > end or self._stopped:
                break
            time.sleep(0.2)
        silent = [rank for rank, p in positions.items() if rank in begin and begin[rank].beat == p.beat]
        unknown = [rank for rank in range(self._world_size) if rank != self._rank and rank not in positions]
        known = f"no response from {ranks_in_words(silent)}" if silent else "the other ranks are alive"
        known += f", and nothing is known about {ranks_in_words(unknown)}" if unknown else ""
        others = "; ".join(f"rank {rank} {position}" for rank, position in sorted(positions.items()))
        return RankLostError(f"rank {self._rank}: {what} failed: {error}; {known}: {others}")

    def _without_board(self, what: str, silence: BaseException) -> RankLostError:
        dead = [rank for rank, position in sorted(self._met.items()) if has_died(position)]
        known = f"{ranks_in_words(dead)}: process has died" if dead else "the state of the other ranks is not known"
        return RankLostError(
            f"rank {self._rank}: {what}; {known}: the store of the process group (in rank 0 or the launcher) does not "
            f"answer: {str(silence).splitlines()[0]}"
        )

    def _named(self, where: str, error: BaseException) -> RankDivergenceError:
        """The error, with the entries of each rank where the logs first differ."""
        call, end = self._board.call(), time.monotonic() + LOG_SECONDS
        tails = {}
        while True:
            self._tell()
            logs = self._board.logs()
            tails = {rank: (first, entries) for rank, (_, first, entries) in logs.items()}
            fresh = [rank for rank, (called, _, _) in logs.items() if called >= call]
            found = difference(tails)
            if found is not None or time.monotonic() > end:
                break
            if len(fresh) == self._world_size:
                break
            time.sleep(0.05)
        if found is None:
            return RankDivergenceError(f"{where}: {error}; the first difference is too old to be in the logs")
        return RankDivergenceError(self._sentence(found, self._board.positions()))
