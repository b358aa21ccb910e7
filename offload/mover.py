"""The mover: one thread with an asyncio loop that owns the I/O engine and everything in flight.

Other threads hand it coroutines and hold a `Transfer`. Coroutines run one at a time between their
awaits, so what they share needs no locks; the kernels they call release the GIL.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from offload.errors import StateError, WatchdogError
from offload.stats import Stopwatch

T = TypeVar("T")

WARN_SECONDS = 30.0
RAISE_SECONDS = 300.0


class Transfer(Generic[T]):
    """One job of the mover. It settles once; whatever it leased stays leased until then."""

    def __init__(self, mover: Mover, what: str, future: concurrent.futures.Future[T]) -> None:
        self._mover, self.what, self._future = mover, what, future

    def settled(self) -> bool:
        """True once the job has ended, well or not. Never blocks."""
        return self._future.done()

    def result(self) -> T:
        """Block until settled; return the job's value or raise its error.

        Raises:
            WatchdogError: nothing ended for RAISE_SECONDS; lists what is in flight.
        """
        if not self._future.done():
            self._mover.block(self.what, self._future)
        return self._future.result()

    def settle(self) -> BaseException | None:
        """Block until settled; return the error instead of raising it."""
        try:
            self.result()
        except Exception as error:
            return error
        return None


class Mover:
    """A daemon thread running an event loop.

    Args:
        describe: called for the watchdog; returns one line per transfer in flight.
    """

    def __init__(self, describe: Callable[[], list[str]] | None = None) -> None:
        self._describe = describe or (lambda: [])
        self.exposed = Stopwatch()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="zero-mover", daemon=True)
        self._thread.start()
        self._closed = False

    def post(self, what: str, job: Coroutine[Any, Any, T]) -> Transfer[T]:
        """Start `job` on the mover thread; returns at once.

        Raises:
            StateError: the mover is closed.
        """
        if self._closed:
            job.close()
            raise StateError(f"{what}: the engine is closed")
        return Transfer(self, what, asyncio.run_coroutine_threadsafe(job, self._loop))

    def run(self, what: str, job: Coroutine[Any, Any, T]) -> T:
        """`post` and wait."""
        return self.post(what, job).result()

    def block(self, what: str, future: concurrent.futures.Future[Any]) -> None:
        """Wait for `future`; the time counts as exposed. Warns, then raises, when nothing happens."""
        self._check_not_mine(what)
        begin, warned = time.perf_counter(), False
        with self.exposed.running():
            while True:
                waited = time.perf_counter() - begin
                limit = RAISE_SECONDS if warned else WARN_SECONDS
                try:
                    future.exception(timeout=max(limit - waited, 0.001))
                    return
                except concurrent.futures.CancelledError:
                    return
                except (TimeoutError, concurrent.futures.TimeoutError):
                    message = (
                        f"{what}: no end after {limit:.0f} s; in flight: {'; '.join(self._describe()) or 'nothing'}"
                    )
                    if warned:
                        raise WatchdogError(message) from None
                    warnings.warn(message, RuntimeWarning, stacklevel=3)
                    warned = True

    def close(self) -> None:
        """Let what runs finish, then end the thread. Idempotent."""
        if self._closed:
            return
        self._check_not_mine("closing the mover")
        self._closed = True
        drained = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        self.block("closing the mover", drained)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_not_mine(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise StateError(f"{what}: the mover thread cannot wait for itself")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _drain(self) -> None:
        me = asyncio.current_task()
        while tasks := [task for task in asyncio.all_tasks() if task is not me]:
            await asyncio.wait(tasks)
