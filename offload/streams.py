"""The order of work on a device: streams of our own beside the user's, and fences between them.

[Note: streams] The user's streams compute: a hook runs with that stream current on which the model's work around it
runs. Four are ours: one copies to the device, one copies to the host, on the third the mover works with what lives on
the device, and collectives run on the fourth. A fence is a mark behind all that a stream has been given so far.
Streams wait for fences; the host waits only where it needs the bytes itself: memory that it is going to read, or to
overwrite.

[Note: a device that fails] An error shows where somebody waits for the device, and nothing that was given to it comes
to its end. So the first one is kept: whoever uses the streams afterwards gets it, and nobody waits in vain for memory
behind a fence that is never passed.

[Note: one logic] A machine without a GPU has no streams: there `Streams` copies at once and no fence exists. The same
callers run with copies that lag behind in the tests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch

from offload.accelerator import is_accelerator, module_of, new_event, synchronize, use
from offload.errors import StateError
from offload.stopwatch import awaiting_others
from offload.timeline import COPIES, Timeline


class Mark(Protocol):
    """A point in the order of a stream's work."""

    def query(self) -> bool:
        """True once the stream has come so far. Never blocks."""


Fence: TypeAlias = "Mark | None"
"""None: there is nothing to wait for."""


class Leased(Protocol):
    """Something to give back."""

    def release(self) -> None:
        """Do so."""


class Streams:
    """Those of a device that is the host itself: everything has happened when a call returns."""

    shared = True
    """The device's memory is the host's: the disk and the CPU's kernels can address it."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline()
        self._leaving: deque[tuple[Leased, tuple[Fence, ...]]] = deque()
        self._reaper: asyncio.Future[None] | None = None
        self._host: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise StateError if the device has failed."""
        if self._failure is not None:
            raise StateError(
                f"the device has failed: {type(self._failure).__name__}: {self._failure}; what was under way there is "
                "lost: close the engine, and go on from a checkpoint in a new process"
            ) from self._failure

    # ---- any thread ---------------------------------------------------------------------------

    def fence(self) -> Fence:
        """Behind all that the calling thread's current stream has been given."""
        return None

    def behind_copies_in(self) -> Fence:
        """Behind every copy to the device so far."""
        return None

    def behind_updates(self) -> Fence:
        """Behind all that the mover has given the device so far."""
        return None

    def collective(self, *after: Fence) -> AbstractContextManager[None]:
        """Inside, the calling thread's current stream is that of collectives, which waits for `after` first."""
        return nullcontext()

    def wait(self, *fences: Fence) -> None:
        """Let the calling thread's current stream wait for them. The thread itself goes on."""

    def wait_to_use(self, tensor: torch.Tensor, *after: Fence) -> None:
        """As `wait`; nobody gets the memory of `tensor` before that stream has come past what it is given with it.

        Dropped, memory of torch's allocator goes back behind the stream that it was allocated on, however far others
        are. For the stream of the allocation itself this costs nothing.
        """
        self.wait(*after)

    def follow(self, stream: Any) -> Any:
        """The calling thread's current stream, made to wait for all that `stream` has been given.

        Args:
            stream: what an earlier call returned, or None.
        """
        return None

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        """Copy once the device has come to `after`; returns a fence behind the copy. Until then both stay as they are.

        Args:
            target: (N,) of the device.
            source: (N,) of the same dtype, of the host (pinned: else the thread may have to wait) or the device.
            after: fences.
        """
        with self._timeline.span(COPIES, f"to {target.device}", source.nbytes):
            target.copy_(source)
        return None

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        """As `copy_in`, from the device to the host."""
        return self.copy_in(target, source, *after)

    # ---- the mover's loop ---------------------------------------------------------------------

    def enter(self) -> None:
        """The calling thread is the mover: what it gives the device goes to a stream of its own."""

    async def reached(self, *fences: Fence) -> None:
        """Return once all are passed; the loop goes on meanwhile."""

    async def compute_on_host(self, work: Callable[[], None]) -> None:
        """Run `work`, kernels on memory of the host. Where the device is another one the loop goes on meanwhile.

        One at a time: each takes as many cores as it is worth.
        """
        if self.shared:
            work()
            return
        if self._host is None:
            self._host = ThreadPoolExecutor(1, "zero-host-kernels", initializer=self.enter)
        await asyncio.get_running_loop().run_in_executor(self._host, work)

    def release(self, block: Leased, *fences: Fence) -> None:
        """Give `block` back once all are passed; returns at once. Raises StateError if the device has failed."""
        waiting = tuple(fence for fence in fences if fence is not None)
        if not waiting or self._failure is not None:
            block.release()
            self.check()
            return
        self._leaving.append((block, waiting))
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.ensure_future(self._reap())

    def close(self) -> None:
        """Wait until the device is idle: its memory is about to be freed."""
        if self._host is not None:
            self._host.shutdown()

    async def _reap(self) -> None:
        while self._leaving:
            block, fences = self._leaving[0]
            try:
                await self.reached(*fences)
            except Exception as error:
                # The block goes back all the same: who waits for it shall meet the error, and not the watchdog.
                self._note_failure(error)
            self._leaving.popleft()
            block.release()

    def _note_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error


class DeviceStreams(Streams):
    """Those of one accelerator."""

    shared = False

    def __init__(self, device: torch.device, timeline: Timeline | None = None) -> None:
        super().__init__(timeline)
        self._device, self._module = device, module_of(device)
        self._in, self._out, self._updates, self._collectives = (self._module.Stream(device) for _ in range(4))
        self._collects = False  # Work of other ranks may lie before a fence.
        self._waiters = ThreadPoolExecutor(thread_name_prefix="zero-fence", initializer=use, initargs=(device,))

    def fence(self) -> Fence:
        """See `Streams`."""
        return self._mark(self._module.current_stream(self._device))

    def behind_copies_in(self) -> Fence:
        """See `Streams`."""
        return self._mark(self._in)

    def behind_updates(self) -> Fence:
        """See `Streams`."""
        return self._mark(self._updates)

    @contextmanager
    def collective(self, *after: Fence) -> Iterator[None]:
        """See `Streams`."""
        self._collects = True
        self._hold(self._collectives, after)
        with self._module.stream(self._collectives):
            yield

    def wait(self, *fences: Fence) -> None:
        """See `Streams`."""
        self._hold(self._module.current_stream(self._device), fences)

    def wait_to_use(self, tensor: torch.Tensor, *after: Fence) -> None:
        """See `Streams`."""
        self.wait(*after)
        tensor.record_stream(self._module.current_stream(self._device))

    def follow(self, stream: Any) -> Any:
        """See `Streams`."""
        current = self._module.current_stream(self._device)
        if stream is not None and stream != current:
            self._hold(current, (self._mark(stream),))
        return current

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        """See `Streams`."""
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        """See `Streams`."""
        return self._copy(self._out, target, source, after)

    def enter(self) -> None:
        """See `Streams`."""
        use(self._device)
        self._module.set_stream(self._updates)

    async def reached(self, *fences: Fence) -> None:
        """See `Streams`. A thread sleeps in the driver for each; polling would cost the loop its time."""
        self.check()
        waiting: list[Any] = [fence for fence in fences if fence is not None]
        try:
            for fence in waiting:
                if not fence.query():
                    with awaiting_others() if self._collects else nullcontext():  # perhaps behind a slower rank
                        await asyncio.get_running_loop().run_in_executor(self._waiters, fence.synchronize)
        except Exception as error:
            self._note_failure(error)
            raise

    def close(self) -> None:
        """See `Streams`. Waits for the user's streams too: they may still compute with our memory.

        Raises what the device says if it has failed and nobody was told; threads are given back all the same.
        """
        super().close()
        try:
            if self._failure is None:
                synchronize(self._device)
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            self._waiters.shutdown()

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: tuple[Fence, ...]) -> Fence:
        self._hold(stream, after)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        copied = self._mark(stream)
        if self._timeline.on:
            self._waiters.submit(self._record, copied, f"to {target.device}", time.perf_counter_ns(), source.nbytes)
        return copied

    def _record(self, copied: Any, name: str, begin_ns: int, nbytes: int) -> None:
        """Note a copy from when it was asked for until it is done; only while somebody records."""
        try:
            copied.synchronize()
        except Exception as error:
            self._note_failure(error)
            return
        self._timeline.add(COPIES, name, begin_ns, nbytes)

    def _hold(self, stream: Any, fences: tuple[Fence, ...]) -> None:
        self.check()
        for fence in fences:
            if fence is not None:
                stream.wait_event(fence)

    def _mark(self, stream: Any) -> Mark:
        event = new_event(self._device)
        event.record(stream)
        mark: Mark = event
        return mark


def open_streams(device: torch.device, timeline: Timeline | None = None) -> Streams:
    """The streams of `device`; copies are noted in `timeline`."""
    return DeviceStreams(device, timeline) if is_accelerator(device) else Streams(timeline)


def shares_host_memory(device: torch.device) -> bool:
    """True when the disk and the CPU can address the device's memory."""
    return device.type == "cpu"
