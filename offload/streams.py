"""The order of work on a device: the engine's own streams in addition to the user's, and events between them.

[Note: streams] The user's streams compute: in a hook, the current stream is the one that runs the model's work around
the hook. The engine has four streams: one copies to the device, one copies to the host, the I/O loop works on the third
with memory of the device, and collectives run on the fourth. An event marks the end of all work that was queued on a
stream so far. Streams wait for events; the host waits only if it needs the bytes itself, before it reads or overwrites
memory.

[Note: a device that fails] The error of a device appears only when a thread waits for it, and work queued on the
device never finishes. So the first error is kept: all later users of the streams get it, and no thread waits for memory
whose event would never be complete.

[Note: one logic] A machine without a GPU has no streams: there `Streams` copies at once and there are no events. The
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

from offload.accelerator import is_accelerator, module_of, new_event, set_device, synchronize
from offload.errors import StateError
from offload.timeline import COPIES, Timeline, external_wait


class Event(Protocol):
    """A point in the order of a stream's work."""

    def query(self) -> bool:
        """True once the stream has passed this point. Never blocks."""


MaybeEvent: TypeAlias = "Event | None"
"""None: there is nothing to wait for."""


class Freeable(Protocol):
    """An object whose memory can be freed."""

    def free(self) -> None:
        """Return the object to its owner."""


class Streams:
    """The streams of a device that is the host itself: all work has finished when a call returns."""

    has_unified_memory = True
    """The device's memory is the host's: the disk and the CPU's kernels can address it."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline()
        self._pending_frees: deque[tuple[Freeable, tuple[MaybeEvent, ...]]] = deque()
        self._free_task: asyncio.Future[None] | None = None
        self._host: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None

    def check_device(self) -> None:
        """Raise StateError if the device has failed."""
        if self._failure is not None:
            raise StateError(
                f"the device has failed: {type(self._failure).__name__}: {self._failure}; work in progress on it is "
                "lost: close the engine, and continue from a checkpoint in a new process"
            ) from self._failure

    # ---- any thread ---------------------------------------------------------------------------

    def record_event(self) -> MaybeEvent:
        """An event after all work so far on the calling thread's current stream."""
        return None

    def record_copy_event(self) -> MaybeEvent:
        """An event after all copies to the device so far."""
        return None

    def record_update_event(self) -> MaybeEvent:
        """An event after all work that the I/O loop has queued on the device so far."""
        return None

    def collective_stream(self, *after: MaybeEvent) -> AbstractContextManager[None]:
        """Inside, the calling thread's current stream is the one for collectives; it first waits for `after`."""
        return nullcontext()

    def copy_to_host_stream(self, *after: MaybeEvent) -> AbstractContextManager[None]:
        """Inside, the calling thread's current stream is that of copies to the host; it first waits for `after`."""
        self.wait_events(*after)
        return nullcontext()

    def wait_events(self, *events: MaybeEvent) -> None:
        """Let the calling thread's current stream wait for the events. The thread itself does not wait."""

    def wait_and_record_stream(self, tensor: torch.Tensor, *after: MaybeEvent) -> None:
        """As `wait_events`; the memory of `tensor` is not reused before that stream has finished its work with it.

        When a tensor is dropped, torch's allocator reuses its memory in the order of the stream that it was allocated
        on, even if other streams still use it. For the allocating stream itself this call costs nothing.
        """
        self.wait_events(*after)

    def current_stream(self) -> Any:
        """The calling thread's current stream; None where there are no streams."""
        return None

    def wait_stream(self, stream: Any) -> None:
        """Let the calling thread's current stream wait for all work of `stream` so far. None: nothing to wait for."""

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Inside, `stream` is the calling thread's current stream. `stream`: a `current_stream`, or None."""
        return nullcontext()

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        """Copy once the device has passed `after`; returns an event after the copy.

        Leave both tensors unchanged until that event is complete.

        Args:
            target: (N,) on the device.
            source: (N,) of the same dtype, on the host (pinned: else the thread may have to wait) or the device.
            after: events that the copy waits for.
        """
        with self._timeline.span(COPIES, f"to {target.device}", source.nbytes):
            target.copy_(source)
        return None

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        """As `copy_to_device`, from the device to the host."""
        return self.copy_to_device(target, source, *after)

    # ---- the I/O loop -------------------------------------------------------------------------

    def enter_io_thread(self) -> None:
        """Call it on the I/O loop's thread: its work on the device then runs on the loop's own stream."""

    async def synchronize(self, *events: MaybeEvent) -> None:
        """Return once all events are complete; the loop runs other tasks meanwhile."""

    async def compute_on_host(self, work: Callable[[], None]) -> None:
        """Run `work`, kernels on host memory. If the device is not the host, the loop runs other tasks meanwhile.

        One work at a time: each uses as many cores as are useful for it.
        """
        if self.has_unified_memory:
            work()
            return
        if self._host is None:
            self._host = ThreadPoolExecutor(1, "zero-host-kernels", initializer=self.enter_io_thread)
        await asyncio.get_running_loop().run_in_executor(self._host, work)

    def free_after(self, block: Freeable, *events: MaybeEvent) -> None:
        """Free `block` once all events are complete; returns at once. Raises StateError if the device has failed."""
        waiting = tuple(event for event in events if event is not None)
        if not waiting or self._failure is not None:
            block.free()
            self.check_device()
            return
        self._pending_frees.append((block, waiting))
        if self._free_task is None or self._free_task.done():
            self._free_task = asyncio.ensure_future(self._free_pending())

    def close(self) -> None:
        """Wait until the device is idle, since its memory is about to be freed."""
        if self._host is not None:
            self._host.shutdown()

    async def _free_pending(self) -> None:
        while self._pending_frees:
            block, events = self._pending_frees[0]
            try:
                await self.synchronize(*events)
            except Exception as error:
                # The block is freed nevertheless: its next user must get this error, and not the watchdog's.
                self._note_failure(error)
            self._pending_frees.popleft()
            block.free()

    def _note_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error


class DeviceStreams(Streams):
    """The streams of one accelerator; `Streams` says what each method does."""

    has_unified_memory = False

    def __init__(self, device: torch.device, timeline: Timeline | None = None) -> None:
        super().__init__(timeline)
        self._device, self._module = device, module_of(device)
        self._in = self._module.Stream(device)
        self._out = self._module.Stream(device)
        self._updates = self._module.Stream(device)
        self._collectives = self._module.Stream(device)
        self._has_collectives = False  # True: work of other ranks may come before an event.
        self._waiters = ThreadPoolExecutor(thread_name_prefix="zero-fence", initializer=set_device, initargs=(device,))

    def record_event(self) -> MaybeEvent:
        return self._record_event_on(self._module.current_stream(self._device))

    def record_copy_event(self) -> MaybeEvent:
        return self._record_event_on(self._in)

    def record_update_event(self) -> MaybeEvent:
        return self._record_event_on(self._updates)

    @contextmanager
    def collective_stream(self, *after: MaybeEvent) -> Iterator[None]:
        self._has_collectives = True
        self._wait_events_on(self._collectives, after)
        with self._module.stream(self._collectives):
            yield

    def copy_to_host_stream(self, *after: MaybeEvent) -> AbstractContextManager[None]:
        self._wait_events_on(self._out, after)
        return self._module.stream(self._out)  # type: ignore[no-any-return]

    def wait_events(self, *events: MaybeEvent) -> None:
        self._wait_events_on(self._module.current_stream(self._device), events)

    def wait_and_record_stream(self, tensor: torch.Tensor, *after: MaybeEvent) -> None:
        self.wait_events(*after)
        tensor.record_stream(self._module.current_stream(self._device))

    def current_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def wait_stream(self, stream: Any) -> None:
        current = self.current_stream()
        if stream is not None and stream != current:
            self._wait_events_on(current, (self._record_event_on(stream),))

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext() if stream is None else self._module.stream(stream)

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        return self._copy(self._in, target, source, after)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        return self._copy(self._out, target, source, after)

    def enter_io_thread(self) -> None:
        set_device(self._device)
        self._module.set_stream(self._updates)

    async def synchronize(self, *events: MaybeEvent) -> None:
        """For each event a thread sleeps in the driver; polling would take the loop's time."""
        self.check_device()
        waiting: list[Any] = [event for event in events if event is not None]
        try:
            for event in waiting:
                if not event.query():
                    with external_wait() if self._has_collectives else nullcontext():  # perhaps for a slower rank
                        await asyncio.get_running_loop().run_in_executor(self._waiters, event.synchronize)
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

    def _copy(
        self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: tuple[MaybeEvent, ...]
    ) -> MaybeEvent:
        self._wait_events_on(stream, after)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        event = self._record_event_on(stream)
        if self._timeline.is_on:
            self._waiters.submit(self._record_span, event, f"to {target.device}", time.perf_counter_ns(), source.nbytes)
        return event

    def _record_span(self, event: Any, name: str, begin_ns: int, nbytes: int) -> None:
        """Record a copy from its request to its end; only while the timeline is on."""
        try:
            event.synchronize()
        except Exception as error:
            self._note_failure(error)
            return
        self._timeline.add(COPIES, name, begin_ns, nbytes)

    def _wait_events_on(self, stream: Any, events: tuple[MaybeEvent, ...]) -> None:
        self.check_device()
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def _record_event_on(self, stream: Any) -> Event:
        event = new_event(self._device)
        event.record(stream)
        recorded: Event = event
        return recorded


def open_streams(device: torch.device, timeline: Timeline | None = None) -> Streams:
    """The streams of `device`; copies are recorded in `timeline`."""
    return DeviceStreams(device, timeline) if is_accelerator(device) else Streams(timeline)


def shares_host_memory(device: torch.device) -> bool:
    """True when the disk and the CPU can address the device's memory."""
    return device.type == "cpu"
