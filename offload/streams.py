"""The order of work on a device: the engine's own streams in addition to the user's, and fences between them.

[Note: streams] The user's streams compute: in a hook, the current stream is the one that runs the model's work around
the hook. The engine has four streams: one copies to the device, one copies to the host, the mover works on the third
with memory of the device, and collectives run on the fourth. A fence marks the end of all work that a stream has been
given so far. Streams wait for fences; the host waits only if it needs the bytes itself, before it reads or overwrites
memory.

[Note: a device that fails] The error of a device appears only when a thread waits for it, and work given to the device
never finishes. So the first error is kept: all later users of the streams get it, and no thread waits for memory
whose fence would never pass.

[Note: one logic] A machine without a GPU has no streams: there `Streams` copies at once and there are no fences. The
tests run the same callers with copies that are late.
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
from offload.timeline import COPIES, Timeline, awaiting_others


class Mark(Protocol):
    """A point in the order of a stream's work."""

    def query(self) -> bool:
        """True once the stream has passed this point. Never blocks."""


Fence: TypeAlias = "Mark | None"
"""None: there is nothing to wait for."""


class Leased(Protocol):
    """An object that can be released."""

    def release(self) -> None:
        """Return the object to its owner."""


class Streams:
    """The streams of a device that is the host itself: all work has finished when a call returns."""

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
                f"the device has failed: {type(self._failure).__name__}: {self._failure}; work in progress on it is "
                "lost: close the engine, and continue from a checkpoint in a new process"
            ) from self._failure

    # ---- any thread ---------------------------------------------------------------------------

    def fence(self) -> Fence:
        """A fence after all work so far on the calling thread's current stream."""
        return None

    def behind_copies_in(self) -> Fence:
        """A fence after all copies to the device so far."""
        return None

    def behind_updates(self) -> Fence:
        """A fence after all work so far that the mover has given the device."""
        return None

    def collective(self, *after: Fence) -> AbstractContextManager[None]:
        """Inside, the calling thread's current stream is the one for collectives; it first waits for `after`."""
        return nullcontext()

    def leaving(self, *after: Fence) -> AbstractContextManager[None]:
        """Inside, the calling thread's current stream is that of copies to the host; it first waits for `after`."""
        self.wait(*after)
        return nullcontext()

    def wait(self, *fences: Fence) -> None:
        """Let the calling thread's current stream wait for the fences. The thread itself does not wait."""

    def wait_to_use(self, tensor: torch.Tensor, *after: Fence) -> None:
        """As `wait`; the memory of `tensor` is not reused before that stream has finished its work with it.

        When a tensor is dropped, torch's allocator reuses its memory in the order of the stream that it was allocated
        on, even if other streams still use it. For the allocating stream itself this call costs nothing.
        """
        self.wait(*after)

    def follow(self, stream: Any) -> Any:
        """Returns the calling thread's current stream, after making it wait for all work of `stream` so far.

        Args:
            stream: the result of an earlier call, or None.
        """
        return None

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Inside, `stream` is the calling thread's current stream. `stream`: a result of `follow`, or None."""
        return nullcontext()

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        """Copy once the device has passed `after`; returns a fence after the copy.

        Leave both tensors unchanged until that fence has passed.

        Args:
            target: (N,) on the device.
            source: (N,) of the same dtype, on the host (pinned: else the thread may have to wait) or the device.
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
        """Make the calling thread the mover: its work on the device then runs on the mover's stream."""

    async def reached(self, *fences: Fence) -> None:
        """Return once all fences have passed; the loop runs other tasks meanwhile."""

    async def compute_on_host(self, work: Callable[[], None]) -> None:
        """Run `work`, kernels on host memory. If the device is not the host, the loop runs other tasks meanwhile.

        One work at a time: each uses as many cores as are useful for it.
        """
        if self.shared:
            work()
            return
        if self._host is None:
            self._host = ThreadPoolExecutor(1, "zero-host-kernels", initializer=self.enter)
        await asyncio.get_running_loop().run_in_executor(self._host, work)

    def release(self, block: Leased, *fences: Fence) -> None:
        """Release `block` once all fences have passed; returns at once. Raises StateError if the device has failed."""
        waiting = tuple(fence for fence in fences if fence is not None)
        if not waiting or self._failure is not None:
            block.release()
            self.check()
            return
        self._leaving.append((block, waiting))
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.ensure_future(self._reap())

    def close(self) -> None:
        """Wait until the device is idle, since its memory is about to be freed."""
        if self._host is not None:
            self._host.shutdown()

    async def _reap(self) -> None:
        while self._leaving:
            block, fences = self._leaving[0]
            try:
                await self.reached(*fences)
            except Exception as error:
                # The block is released nevertheless: its next user must get this error, and not the watchdog's.
                self._note_failure(error)
            self._leaving.popleft()
            block.release()

    def _note_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error


class DeviceStreams(Streams):
    """The streams of one accelerator; `Streams` says what each method does."""

    shared = False

    def __init__(self, device: torch.device, timeline: Timeline | None = None) -> None:
        super().__init__(timeline)
        self._device, self._module = device, module_of(device)
        self._in, self._out, self._updates, self._collectives = (self._module.Stream(device) for _ in range(4))
        self._collects = False  # True: work of other ranks may come before a fence.
        self._waiters = ThreadPoolExecutor(thread_name_prefix="zero-fence", initializer=use, initargs=(device,))

    def fence(self) -> Fence:
        return self._mark(self._module.current_stream(self._device))

    def behind_copies_in(self) -> Fence:
        return self._mark(self._in)

    def behind_updates(self) -> Fence:
        return self._mark(self._updates)

    @contextmanager
    def collective(self, *after: Fence) -> Iterator[None]:
        self._collects = True
        self._hold(self._collectives, after)
        with self._module.stream(self._collectives):
            yield

    def leaving(self, *after: Fence) -> AbstractContextManager[None]:
        self._hold(self._out, after)
        return self._module.stream(self._out)  # type: ignore[no-any-return]

    def wait(self, *fences: Fence) -> None:
        self._hold(self._module.current_stream(self._device), fences)

    def wait_to_use(self, tensor: torch.Tensor, *after: Fence) -> None:
        self.wait(*after)
        tensor.record_stream(self._module.current_stream(self._device))

    def follow(self, stream: Any) -> Any:
        current = self._module.current_stream(self._device)
        if stream is not None and stream != current:
            self._hold(current, (self._mark(stream),))
        return current

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext() if stream is None else self._module.stream(stream)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, *after: Fence) -> Fence:
        return self._copy(self._out, target, source, after)

    def enter(self) -> None:
        use(self._device)
        self._module.set_stream(self._updates)

    async def reached(self, *fences: Fence) -> None:
        """For each fence a thread sleeps in the driver; polling would take the loop's time."""
        self.check()
        waiting: list[Any] = [fence for fence in fences if fence is not None]
        try:
            for fence in waiting:
                if not fence.query():
                    with awaiting_others() if self._collects else nullcontext():  # perhaps for a slower rank
                        await asyncio.get_running_loop().run_in_executor(self._waiters, fence.synchronize)
        except Exception as error:
            self._note_failure(error)
            raise

    def close(self) -> None:
        """Waits for the user's streams too: they may still compute with the engine's memory.

        Raises the device's error if it has failed and no caller got it; the threads end in any case.
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
        """Record a copy from its request to its end; only while the timeline is on."""
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
    """The streams of `device`; copies are recorded in `timeline`."""
    return DeviceStreams(device, timeline) if is_accelerator(device) else Streams(timeline)


def shares_host_memory(device: torch.device) -> bool:
    """True when the disk and the CPU can address the device's memory."""
    return device.type == "cpu"
