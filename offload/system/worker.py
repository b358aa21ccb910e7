"""Threads for blocking calls of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from offload.accelerator import device_initializer

T = TypeVar("T")


class Worker:
    """Runs calls in order, on the device of the thread that created the worker.

    Python does not exit before the worker is closed, and until then it accepts calls. A `ThreadPoolExecutor` refuses
    calls as soon as the main thread has ended.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._threads, self._enter = threads, device_initializer()
        for _ in range(threads):
            threading.Thread(target=self._serve, name=name, daemon=False).start()

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on one of the worker's threads; returns its result, or raises its error."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after the calls that were accepted. Never blocks. Idempotent."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0

    def _serve(self) -> None:
        entered = False
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if not entered:  # inside the try: the caller of a job gets the error
                    self._enter()
                entered = True
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
