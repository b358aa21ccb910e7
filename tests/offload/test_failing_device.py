"""A device that fails: the error reaches whoever waits or submits next, and nobody waits for the watchdog."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pretended import pretend_accelerator

import offload.io.io_loop
from offload.errors import StateError
from offload.io.io_loop import IoLoop
from offload.memory.pool import BlockPool
from offload.streams import DeviceStreams
from offload.timeline import Timeline

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
ERROR = "CUDA error: an illegal memory access was encountered"


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class FakeEvent:
    """Never passed; who waits for it gets the device's error, once `broken` is set, or else waits for that."""

    broken = threading.Event()

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def record(self, stream: FakeStream) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        assert self.broken.wait(60)
        raise RuntimeError(ERROR)


class Block:
    """Something that was leased."""

    returned = False

    def free(self) -> None:
        self.returned = True


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Torch sees such a device; to call it makes the device fail."""
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 5.0)
    monkeypatch.setattr(FakeEvent, "broken", threading.Event())
    stream = FakeStream(DEVICE)
    pretend_accelerator(
        monkeypatch,
        Stream=FakeStream,
        Event=FakeEvent,
        current_stream=lambda device: stream,
        stream=lambda stream: nullcontext(),
        set_stream=lambda stream: None,
        set_device=lambda device: None,
        synchronize=lambda device: None,
    )
    yield FakeEvent.broken.set
    FakeEvent.broken.set()


@pytest.fixture
def streams(failing: Callable[[], None]) -> Iterator[DeviceStreams]:
    opened = DeviceStreams(DEVICE, Timeline())
    yield opened
    failing()
    opened.close()


@pytest.fixture
def mover(streams: DeviceStreams) -> Iterator[IoLoop]:
    opened = IoLoop(initializer=streams.enter_io_thread)
    yield opened
    opened.close()


async def until_noted(streams: DeviceStreams) -> None:
    while streams._failure is None:
        await asyncio.sleep(0.001)


async def releasing(streams: DeviceStreams, block: Any, fence: Any) -> None:
    streams.free_after(block, fence)


def test_a_block_behind_a_fence_that_fails_goes_back_and_the_next_call_raises(
    streams: DeviceStreams, mover: IoLoop, failing: Callable[[], None]
) -> None:
    blocks, memory = [Block() for _ in range(3)], torch.zeros(4)
    for block in blocks[:2]:
        mover.run("releasing", releasing(streams, block, streams.record_event()))
    assert not any(block.returned for block in blocks)
    failing()
    mover.run("the error", until_noted(streams))
    calls: dict[str, Callable[[], object]] = {
        "release": lambda: mover.run("releasing", releasing(streams, blocks[2], streams.record_event())),
        "reached": lambda: mover.run("waiting", streams.synchronize(None)),
        "wait": lambda: streams.wait_events(),
        "copy in": lambda: streams.copy_to_device(memory, memory),
        "copy out": lambda: streams.copy_to_host(memory, memory),
        "collective": lambda: streams.collective_stream().__enter__(),
    }
    for what, call in calls.items():
        with pytest.raises(StateError, match=f"the device has failed: RuntimeError: {ERROR}") as caught:
            call()
        assert str(caught.value.__cause__) == ERROR, what
    assert all(block.returned for block in blocks), "whoever waits for memory must come to see the error"


def test_a_job_that_waits_for_memory_of_a_failed_device_ends_with_the_error(
    streams: DeviceStreams, mover: IoLoop, failing: Callable[[], None]
) -> None:
    arena = BlockPool("test", 8192, "none", HOST)
    first = arena.allocate(8192, "first")
    mover.run("releasing", releasing(streams, first, streams.record_event()))

    async def next_job() -> None:
        block = await arena.allocate_async(8192, "second")
        try:
            streams.copy_to_device(block.data, block.data)
        finally:
            streams.free_after(block)

    transfer = mover.submit("the next job", next_job())
    assert not transfer.done()
    failing()
    with pytest.raises(StateError, match="the device has failed"):
        transfer.result()
    arena.close()


def test_who_waits_for_the_fence_itself_gets_the_error_and_so_does_the_next(
    streams: DeviceStreams, mover: IoLoop, failing: Callable[[], None]
) -> None:
    failing()
    with pytest.raises(RuntimeError, match=ERROR):
        mover.run("waiting", streams.synchronize(streams.record_event()))
    with pytest.raises(StateError, match="the device has failed"):
        streams.wait_events()


def test_an_error_that_only_the_recorder_of_copies_meets_is_not_lost(
    streams: DeviceStreams, mover: IoLoop, failing: Callable[[], None]
) -> None:
    memory = torch.zeros(4)
    streams._timeline.start()
    streams.copy_to_device(memory, memory)
    failing()
    mover.run("the error", until_noted(streams))
    with pytest.raises(StateError, match="the device has failed"):
        streams.copy_to_device(memory, memory)


def test_closing_gives_the_threads_back_whatever_the_device_says(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[], None]
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(ERROR)

    streams = DeviceStreams(DEVICE)
    monkeypatch.setattr(torch.get_device_module(DEVICE), "synchronize", fail)
    with pytest.raises(RuntimeError, match=ERROR):
        streams.close()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        streams._waiters.submit(int)
    streams.close()  # who was told is not told again


# ---- a mover that cannot begin -----------------------------------------------------------------------------------


def test_a_mover_that_could_not_begin_says_so_to_whoever_hands_it_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 2.0)

    def enter() -> None:
        raise RuntimeError(ERROR)

    async def job() -> int:
        return 1

    mover = IoLoop(initializer=enter)
    for give in (mover.submit, mover.run):
        with pytest.raises(StateError, match="I/O loop's thread could not start: RuntimeError: CUDA") as caught:
            give("a job", job())
        assert str(caught.value.__cause__) == ERROR
    mover.close()
    with pytest.raises(StateError, match="the engine is closed"):
        mover.run("a job", job())
