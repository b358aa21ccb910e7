"""Copies between planes and memory the disk cannot reach: any buffer, through a small arena, in chunks."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.array import copies
from offload.array.copies import (
    copy_single_threaded,
    fetch_array,
    load_array,
    read_array,
    write_array,
    zero_single_threaded,
)
from offload.array.tiered_array import Disk, Home, TieredArray
from offload.errors import BudgetError, StorageError
from offload.io.aio import AioFault, AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.host_memory import map_host, tensor_over
from offload.memory.pool import BlockPool
from offload.streams import Streams

BLOCK = 4096
CPU = torch.device("cpu")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(copies, "CHUNK_BYTES", 4 * BLOCK)
    opened = Disk(open_aio(AioOptions(queue_depth=4, threads=2)), SwapSpace([tmp_path], 80 * BLOCK))
    yield opened
    opened.aio.close()
    opened.swap.close()


def run(job: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(job, 20))


def plane_of(disk: Disk, blocks: list[tuple[int, bool]], width: int) -> TieredArray:
    """Homes of (blocks, in memory)."""
    homes, begin, offset = [], 0, 0
    for count, in_memory in blocks:
        nbytes = count * BLOCK * width
        memory = torch.zeros(nbytes, dtype=torch.uint8) if in_memory else None
        homes.append(Home(begin, begin + count * BLOCK, memory, offset))
        begin, offset = begin + count * BLOCK, offset + (0 if in_memory else nbytes)
    return TieredArray("weights", width, homes, disk)


def odd_buffer(nbytes: int) -> torch.Tensor:
    """Memory of a user: at an address O_DIRECT would refuse."""
    return torch.zeros(nbytes + 13, dtype=torch.uint8)[13:]


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_any_range_goes_out_and_comes_back_through_one_chunk_of_arena(
    disk: Disk, blocks: list[tuple[int, bool]], width: int, data: st.DataObject
) -> None:
    plane, arena = plane_of(disk, blocks, width), BlockPool("host", 4 * BLOCK, "memory_budget.host", CPU)
    model = np.zeros(plane.numel * width, dtype=np.uint8)
    clear = odd_buffer(model.size)
    run(write_array(plane, 0, plane.numel, clear, arena))
    for seed in range(data.draw(st.integers(1, 3), label="transfers")):
        cut = st.integers(0, plane.numel // BLOCK)
        begin, end = sorted((data.draw(cut) * BLOCK, data.draw(cut) * BLOCK))
        source = odd_buffer((end - begin) * width)
        source.copy_(noise(source.numel(), seed))
        run(write_array(plane, begin, end, source, arena))
        model[begin * width : end * width] = source.numpy()
    into = odd_buffer(model.size)
    run(read_array(plane, 0, plane.numel, into, arena))
    assert np.array_equal(into.numpy(), model)
    element = st.integers(0, plane.numel)
    begin, end = sorted((data.draw(element, label="begin"), data.draw(element, label="end")))
    odd = odd_buffer((end - begin) * width)
    run(fetch_array(plane, begin, end, odd, arena, Streams(), ()))
    assert np.array_equal(odd.numpy(), model[begin * width : end * width])
    assert np.array_equal(run(load_array(plane, begin, end, arena)).numpy(), odd.numpy())
    assert arena.used_bytes == 0 and arena.peak_bytes <= 4 * BLOCK


def test_several_copies_at_once_share_a_small_arena(disk: Disk) -> None:
    plane, arena = plane_of(disk, [(16, False)], 1), BlockPool("host", 4 * BLOCK, "memory_budget.host", CPU)
    truth = noise(16 * BLOCK, 1)

    async def job() -> list[torch.Tensor]:
        await asyncio.gather(
            *(
                write_array(plane, at, at + 4 * BLOCK, truth[at : at + 4 * BLOCK], arena)
                for at in range(0, 16 * BLOCK, 4 * BLOCK)
            )
        )
        out = [odd_buffer(16 * BLOCK) for _ in range(3)]
        await asyncio.gather(*(read_array(plane, 0, 16 * BLOCK, into, arena) for into in out))
        return out

    assert all(torch.equal(into, truth) for into in run(job()))
    assert arena.used_bytes == 0


def test_what_is_in_memory_needs_no_arena(disk: Disk) -> None:
    plane, arena = plane_of(disk, [(2, True), (3, True)], 2), BlockPool("host", 0, "memory_budget.host", CPU)
    source, into = noise(4 * BLOCK * 2, 0), odd_buffer(4 * BLOCK * 2)
    run(write_array(plane, BLOCK, 5 * BLOCK, source, arena))
    run(read_array(plane, BLOCK, 5 * BLOCK, into, arena))
    assert torch.equal(into, source)


def test_an_arena_without_room_for_a_chunk_names_plane_and_knob(disk: Disk) -> None:
    plane, arena = plane_of(disk, [(8, False)], 1), BlockPool("host", BLOCK, "memory_budget.host", CPU)
    with pytest.raises(BudgetError, match=r"chunk of weights.*memory_budget\.host"):
        run(read_array(plane, 0, 8 * BLOCK, odd_buffer(8 * BLOCK), arena))


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_fault_gives_its_chunk_back(disk: Disk, op: str) -> None:
    plane, arena = plane_of(disk, [(12, False)], 1), BlockPool("host", 4 * BLOCK, "memory_budget.host", CPU)
    truth, into = noise(12 * BLOCK, 1), odd_buffer(12 * BLOCK)
    copy = read_array if op == "read" else write_array

    async def job() -> None:
        await write_array(plane, 0, 12 * BLOCK, truth, arena)
        disk.aio.inject(AioFault(errno=errno.EIO, fail_rate=1.0, ops=(op,), skip=1))  # type: ignore[arg-type]
        with pytest.raises(StorageError) as caught:
            await copy(plane, 0, 12 * BLOCK, into, arena)
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 4 * BLOCK)
        assert arena.used_bytes == 0
        disk.aio.inject(None)
        await write_array(plane, 0, 12 * BLOCK, truth, arena)
        await read_array(plane, 0, 12 * BLOCK, into, arena)

    run(job())
    assert torch.equal(into, truth)


@pytest.mark.parametrize("blocks", [[(6, False)], [(6, True)], [(2, True), (4, False)]])
def test_on_the_cpu_a_fetch_lands_in_the_target_itself(disk: Disk, blocks: list[tuple[int, bool]]) -> None:
    plane, arena = plane_of(disk, blocks, 2), BlockPool("host", 4 * BLOCK, "memory_budget.host", CPU)
    truth, into = noise(12 * BLOCK, 1), tensor_over(map_host(12 * BLOCK))
    run(write_array(plane, 0, 6 * BLOCK, truth, arena))
    peak, arena = arena.peak_bytes, BlockPool("none", 0, "memory_budget.host", CPU)
    run(fetch_array(plane, 0, 6 * BLOCK, into, arena, Streams(), ()))
    assert torch.equal(into, truth)
    assert arena.peak_bytes == 0 <= peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool])
def test_a_copy_on_one_thread_has_the_same_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (4000,), dtype=torch.uint8)
    source = bits.view(dtype)[1:]  # any pattern: NaNs keep their payload
    target = torch.zeros_like(source)
    copy_single_threaded(target, source)
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
    zero_single_threaded(target[5:-5])
    assert target[5:-5].count_nonzero() == 0 and target[:5].view(torch.uint8).equal(source[:5].view(torch.uint8))


def test_a_copy_to_another_dtype_converts() -> None:
    target = torch.empty(5, dtype=torch.float32)
    copy_single_threaded(target, torch.arange(5, dtype=torch.bfloat16))
    assert target.tolist() == [0, 1, 2, 3, 4]
