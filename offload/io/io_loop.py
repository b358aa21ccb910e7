"""The I/O loop: one thread with an asyncio loop that owns the I/O engine and everything in flight.

Other threads submit coroutines and get an `IoFuture` for each. Between two awaits only one coroutine
runs, so their shared state needs no locks; the kernels that they call release the GIL.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from offload.accelerator import device_initializer
from offload.errors import StateError, WatchdogError
from offload.system.interrupts import deferring_interrupts
from offload.timeline import STALLS, Stopwatch, Timeline, has_external_wait

T = TypeVar("T")
Describe = Callable[[], list[str]]

WARN_SECONDS = 30.0
RAISE_SECONDS = 300.0


class IoFuture(Generic[T]):
    """One job of the I/O loop. It ends once; its blocks stay allocated until then."""

    def __init__(
        self, io_loop: IoLoop, what: str, future: concurrent.futures.Future[T], describe: Describe | None
    ) -> None:
        self._io_loop = io_loop
        self.what = what
        self._future = future
        self._describe = describe

    def done(self) -> bool:
        """True once the job has ended, with or without an error. Never blocks."""
        return self._future.done()

    def result(self) -> T:
        """Block until the job has ended; return the job's value or raise its error.

        Raises WatchdogError: no byte moved and no kernel ran for RAISE_SECONDS; lists the transfers in flight.
        """
        if not self._future.done():
            self._io_loop.wait_for(self.what, self._future, self._describe)
        return self._future.result()

    def wait(self) -> BaseException | None:
        """Block until the job has ended, without a time limit; return the error instead of raising it."""
        while not self._future.done():
            try:
                self._io_loop.wait_for(self.what, self._future, self._describe)
            except WatchdogError as stalled:
                warnings.warn(str(stalled), RuntimeWarning, stacklevel=2)
        try:
            return self._future.exception()
        except concurrent.futures.CancelledError as cancelled:
            return cancelled


class IoLoop:
    """A daemon thread running an event loop.

    Args:
        describe: for the watchdog; returns one line per transfer in flight.
        progress: for the watchdog; returns a number that changes whenever bytes move.
        timeline: where waits are recorded.
        initializer: called first on the new thread; None: the new thread takes the device of the calling one.
    """

    def __init__(
        self,
        describe: Describe | None = None,
        progress: Callable[[], int] | None = None,
        timeline: Timeline | None = None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        self._initializer = initializer or device_initializer()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._describe = describe or (lambda: [])
        self._progress = progress or (lambda: 0)
        self._kernels_running = 0
        self._progress_count = 0  # How often a kernel began or ended, or `note_progress` was called.
        self.exposed_wait = Stopwatch()
        self._timeline = timeline or Timeline()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="zero-io-loop", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a limit of processes
            self._loop.close()
            raise
        self._started.wait()  # so that `submit` knows whether the thread could begin
        self._closed, self._pid = False, os.getpid()
        self._draining: concurrent.futures.Future[None] | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of kernels, for jobs: the watchdog waits for them, however long they take."""
        self._kernels_running, self._progress_count = self._kernels_running + 1, self._progress_count + 1
        try:
            yield
        finally:
            self._kernels_running, self._progress_count = self._kernels_running - 1, self._progress_count + 1

    def note_progress(self) -> None:
        """Tell the watchdog, from a job, that bytes have moved that the loop's own I/O engine does not count."""
        self._progress_count += 1

    def submit(self, what: str, job: Coroutine[Any, Any, T], describe: Describe | None = None) -> IoFuture[T]:
        """Start `job` on the loop's thread; returns at once. `describe`: as the loop's, of an engine of the job's own.

        Raises StateError: the loop is closed or could not begin, or this process was forked from the loop's process.
        """
        try:
            self._check_process(what)
            if self._closed:
                raise StateError(f"{what}: the engine is closed")
            if self._failure is not None:
                raise StateError(
                    f"{what}: the I/O loop's thread could not start: {type(self._failure).__name__}: {self._failure}"
                ) from self._failure
        except StateError:
            job.close()
            raise
        return IoFuture(self, what, asyncio.run_coroutine_threadsafe(job, self._loop), describe)

    def run(self, what: str, job: Coroutine[Any, Any, T]) -> T:
        """`submit`, and wait for the result."""
        return self.submit(what, job).result()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Let the loop call `action`, after all that was submitted before; returns at once."""
        self._loop.call_soon_threadsafe(action)

    def wait_for(self, what: str, future: concurrent.futures.Future[Any], describe: Describe | None = None) -> None:
        """Wait for `future`; the time counts as exposed.

        Warns after WARN_SECONDS in which no byte moved, and raises after RAISE_SECONDS. The watchdog ignores a long job
        whose bytes still move or whose kernels run, and a job that waits for other ranks while no transfer is in flight
        here. Raises WatchdogError: lists the transfers in flight. Raises StateError: called on the loop's thread, or in
        a forked process.
        """
        self._check_process(what)
        self._check_other_thread(what)
        with self.exposed_wait.running(), self._timeline.span(STALLS, what):
            since, last_state, has_warned = time.perf_counter(), self._progress_state(), False
            while not _wait_done(future, min(WARN_SECONDS, RAISE_SECONDS) / 300):
                deferring_interrupts.deliver_overdue()
                state = self._progress_state()
                if state != last_state or self._kernels_running:
                    since, last_state, has_warned = time.perf_counter(), state, False
                stalled_seconds = time.perf_counter() - since
                if stalled_seconds < min(WARN_SECONDS, RAISE_SECONDS):
                    continue
                in_flight = [*self._describe(), *(describe() if describe is not None else ())]
                if stalled_seconds >= RAISE_SECONDS and (in_flight or not has_external_wait()):
                    raise WatchdogError(self._stall_message(what, stalled_seconds, in_flight))
                if stalled_seconds >= WARN_SECONDS and not has_warned:
                    warnings.warn(self._stall_message(what, stalled_seconds, in_flight), RuntimeWarning, stacklevel=3)
                    has_warned = True

    def _progress_state(self) -> tuple[int, int]:
        """Changes whenever bytes move, or kernels begin or end."""
        return self._progress(), self._progress_count

    def _stall_message(self, what: str, seconds: float, lines: list[str]) -> str:
        in_flight = "; ".join(lines) or "nothing"
        return f"{what}: not finished, and no byte moved for {seconds:.0f} s; in flight: {in_flight}"

    def is_current_thread(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self._thread

    def close_soon(self, on_closed: Callable[[], None]) -> None:
        """`close` for the loop's own thread, which cannot join itself: `on_closed` runs after all jobs have ended."""

        async def end() -> None:
            await self._drain()
            on_closed()
            self._loop.stop()

        self._closed = True
        self._ending = self._loop.create_task(end())

    def close(self) -> None:
        """Let running jobs finish, then end the thread. Idempotent; after an interrupt it can be called again."""
        if not self._thread.is_alive():
            return
        self._check_other_thread("closing the I/O loop")
        self._closed = True
        if self._draining is None:  # two draining tasks would wait for each other
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        self.wait_for("closing the I/O loop", self._draining)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_forked(self) -> bool:
        """True in a forked child: the thread, and the I/O engine that is shared with it, are the parent's."""
        return os.getpid() != self._pid

    def _check_process(self, what: str) -> None:
        """A forked child has the loop's memory but not its thread: it would wait for ever."""
        if self.is_forked:
            raise StateError(
                f"{what}: this process ({os.getpid()}) was forked from the one that has the engine ({self._pid}), and "
                "has none of the engine's threads; use the engine in that process, or send the values that the child "
                "needs to it"
            )

    def _check_other_thread(self, what: str) -> None:
        if self.is_current_thread():
            raise StateError(f"{what}: the I/O loop's thread cannot wait for itself")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._initializer()
        except BaseException as error:
            self._failure = error  # the loop runs nevertheless: `close` needs it
        finally:
            self._started.set()
        self._loop.run_forever()

    async def _drain(self) -> None:
        me = asyncio.current_task()
        while tasks := [task for task in asyncio.all_tasks() if task is not me]:
            await asyncio.wait(tasks)


def _wait_done(future: concurrent.futures.Future[Any], seconds: float) -> bool:
    """Wait up to `seconds` for `future`; True once it has ended, with or without an error."""
    done, _ = concurrent.futures.wait([future], timeout=seconds)
    return bool(done)
