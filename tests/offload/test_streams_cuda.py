"""Streams and fences on a GPU. Skipped where there is none; `lagging.py` tests their callers everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from offload.memory.flat_storage import exact_alias
from offload.memory.pool import BlockPool
from offload.streams import DeviceStreams

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

NUMEL = 8 << 20
CYCLES = 200_000_000
"""How long the device sleeps: about a tenth of a second, far longer than a copy that does not wait for it."""


@pytest.fixture
def streams() -> Iterator[DeviceStreams]:
    opened = DeviceStreams(torch.device("cuda", torch.cuda.current_device()))
    yield opened
    opened.close()


@pytest.fixture
def host() -> Iterator[torch.Tensor]:
    arena = BlockPool("host", 2 * NUMEL, "none", torch.device("cpu"), pinned=True)
    yield arena.allocate(NUMEL, "test").data
    arena.close()


def test_a_copy_in_waits_for_the_last_use_and_the_next_use_for_the_copy(
    streams: DeviceStreams, host: torch.Tensor
) -> None:
    memory, before, after = (torch.empty(NUMEL, dtype=torch.uint8, device="cuda") for _ in range(3))
    for _ in range(2):  # what is done for the first time, by the driver too, may wait for the device
        memory.fill_(1)
        host.fill_(2)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        before.copy_(memory)
        copied = streams.copy_to_device(memory, host, streams.record_event())
        streams.wait_events(copied)
        after.copy_(memory)
        has_waited = copied is None or copied.query()
        assert bool((before == 1).all()) and bool((after == 2).all())
    assert not has_waited, "the host must not have waited"


def test_a_copy_out_waits_for_the_producer_and_its_reader_for_the_copy(
    streams: DeviceStreams, host: torch.Tensor
) -> None:
    memory = torch.zeros(NUMEL, dtype=torch.uint8, device="cuda")
    host.fill_(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    memory.fill_(3)
    asyncio.run(streams.synchronize(streams.copy_to_host(host, memory, streams.record_event())))
    assert bool((host == 3).all())


def test_memory_that_was_returned_early_is_used_again_behind_its_fence(streams: DeviceStreams) -> None:
    arena = BlockPool("device", NUMEL, "none", torch.device("cuda", torch.cuda.current_device()))
    out = torch.zeros(NUMEL, dtype=torch.uint8, pin_memory=True)
    block = arena.allocate(NUMEL, "test")
    block.data.fill_(5)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    block.free(streams.copy_to_host(out, block.data, streams.record_event()))
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        again = arena.allocate(NUMEL, "test")
        streams.wait_events(*again.events)
        again.data.fill_(6)
    torch.cuda.synchronize()
    assert bool((out == 5).all()) and bool((again.data == 6).all())


def test_a_stream_that_follows_another_sees_what_it_made(streams: DeviceStreams) -> None:
    memory = torch.zeros(NUMEL, dtype=torch.uint8, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        seen = streams.current_stream()
        torch.cuda._sleep(CYCLES)
        memory.fill_(1)
    with torch.cuda.stream(second):
        streams.wait_stream(seen)
        copy = memory.clone()
    torch.cuda.synchronize()
    assert bool((copy == 1).all())


def test_an_alias_of_device_memory_is_that_memory() -> None:
    memory = torch.zeros(NUMEL, dtype=torch.uint8, device="cuda")
    exact_alias(memory[4096:8192]).fill_(7)
    assert memory.nonzero().flatten().tolist() == list(range(4096, 8192))
