"""Arenas and regions: exact blocks of one allocation that is made late and given back early."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload.memory.pool
from offload.errors import BudgetError, StateError
from offload.memory.pool import Block, BlockPool, LinearPool
from offload.sizes import PAGE_BYTES

CPU = torch.device("cpu")
MIB = 1 << 20


def arena_of(nbytes: int) -> BlockPool:
    return BlockPool("test", nbytes, "memory_budget.test", CPU)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def run(job: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(job, 30))


# ---- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 63, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5])
def test_a_block_has_a_storage_exactly_as_long_as_asked_and_page_aligned(nbytes: int) -> None:
    arena = arena_of(16 * PAGE_BYTES)
    for block in (arena.allocate(nbytes, "first"), arena.allocate(nbytes, "second")):
        assert block.data.numel() == block.data.untyped_storage().nbytes() == nbytes
        assert block.data.storage_offset() == 0
        assert block.data.data_ptr() % PAGE_BYTES == 0


@settings(deadline=None)
@given(
    operations=st.lists(st.one_of(st.integers(0, 5 * PAGE_BYTES), st.integers(-50, -1)), max_size=40),
)
def test_living_blocks_never_share_bytes(operations: list[int]) -> None:
    arena = arena_of(12 * PAGE_BYTES)
    living: list[tuple[Block, int]] = []
    for stamp, operation in enumerate(operations):
        if operation < 0:
            if living:
                living.pop(operation % len(living))[0].free()
        elif (block := arena.try_allocate(operation)) is not None:
            block.data.fill_(stamp)
            living.append((block, stamp))
        assert all(bool((block.data == stamp).all()) for block, stamp in living)
        pages = sum(-(-block.data.numel() // PAGE_BYTES) for block, _ in living)
        assert arena.used_bytes == pages * PAGE_BYTES <= arena.peak_bytes <= arena.capacity_bytes


def test_a_block_is_seen_in_any_dtype_at_any_offset() -> None:
    block = arena_of(PAGE_BYTES).allocate(64, "values")
    block.view(torch.float32, 4, 16).copy_(torch.arange(4.0))
    assert block.data[16:32].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert block.view(torch.bfloat16, 3, 58).untyped_storage().data_ptr() == block.data.data_ptr()


def test_releasing_twice_gives_the_bytes_back_once() -> None:
    arena = arena_of(4 * PAGE_BYTES)
    first = arena.allocate(PAGE_BYTES, "first")
    first.free()
    second = arena.allocate(PAGE_BYTES, "second")
    first.free()
    assert arena.used_bytes == PAGE_BYTES
    second.free()
    assert arena.used_bytes == 0


# ---- no room -----------------------------------------------------------------------------------


def test_a_lease_that_does_not_fit_says_what_is_free_and_which_knob_to_turn() -> None:
    arena = arena_of(10 * PAGE_BYTES)
    blocks = [arena.allocate(2 * PAGE_BYTES, "part") for _ in range(5)]
    blocks[0].free()
    blocks[2].free()
    assert arena.try_allocate(3 * PAGE_BYTES) is None
    with pytest.raises(BudgetError) as caught:
        arena.allocate(3 * PAGE_BYTES, "unit layers.7")
    assert str(caught.value) == (
        "unit layers.7: needs 12,288 contiguous bytes of the test pool; the largest free block has 8,192 of 16,384 "
        "free bytes and 40,960 in total; raise memory_budget.test"
    )
    assert arena.used_bytes == 6 * PAGE_BYTES


def test_an_allocation_that_fails_leaves_nothing_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arena_of(10 * PAGE_BYTES)

    def refuse(nbytes: int, *, prefault: bool = True) -> memoryview:
        raise BudgetError(f"no {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(offload.memory.pool, "map_host", refuse)
        with pytest.raises(BudgetError, match="40960"):
            arena.allocate(1, "first")
    assert arena.used_bytes == 0
    assert arena.allocate(arena.capacity_bytes, "all").data.numel() == arena.capacity_bytes


def test_a_waiting_lease_is_served_when_others_give_back_enough() -> None:
    arena = arena_of(4 * PAGE_BYTES)
    served: list[str] = []

    async def user(name: str, pages: int) -> None:
        block = await arena.allocate_async(pages * PAGE_BYTES, name)
        served.append(name)
        await asyncio.sleep(0)
        block.free()

    async def job() -> None:
        held = [arena.allocate(PAGE_BYTES, "held") for _ in range(4)]
        users = [asyncio.ensure_future(user(f"{pages} pages", pages)) for pages in (4, 3, 2)]
        for block, expected in zip(
            held, ([], ["2 pages"], ["2 pages", "3 pages"], ["2 pages", "3 pages", "4 pages"]), strict=True
        ):
            block.free()
            for _ in range(5):
                await asyncio.sleep(0)
            assert served == expected
        await asyncio.gather(*users)

    run(job())
    assert served == ["2 pages", "3 pages", "4 pages"]
    assert arena.used_bytes == 0


@pytest.mark.parametrize("count", [1, 7, 40])
def test_any_number_of_waiting_leases_are_all_served(count: int) -> None:
    arena = arena_of(3 * PAGE_BYTES)
    most = 0

    async def user(index: int) -> None:
        nonlocal most
        block = await arena.allocate_async((1 + index % 3) * PAGE_BYTES, f"user {index}")
        block.data.fill_(index)
        for _ in range(index % 4):
            await asyncio.sleep(0)
        most = max(most, arena.used_bytes)
        assert bool((block.data == index).all())
        block.free()

    async def job() -> None:
        await asyncio.gather(*(user(index) for index in range(count)))

    run(job())
    assert arena.used_bytes == 0 < most <= arena.capacity_bytes


def test_a_wait_that_nobody_can_end_raises_at_once() -> None:
    arena = arena_of(2 * PAGE_BYTES)
    with pytest.raises(BudgetError, match=r"sub-group.*memory_budget\.test"):
        run(arena.allocate_async(3 * PAGE_BYTES, "sub-group"))


def test_a_wait_for_more_than_there_is_raises_when_the_last_block_comes_back() -> None:
    arena = arena_of(2 * PAGE_BYTES)

    async def job() -> None:
        block = arena.allocate(PAGE_BYTES, "held")
        waiting = asyncio.ensure_future(arena.allocate_async(3 * PAGE_BYTES, "too large"))
        await asyncio.sleep(0)
        assert not waiting.done()
        block.free()
        await waiting

    with pytest.raises(BudgetError, match="too large"):
        run(job())


def test_a_cancelled_wait_takes_nothing_and_disturbs_nobody() -> None:
    arena = arena_of(PAGE_BYTES)

    async def job() -> None:
        block = arena.allocate(PAGE_BYTES, "held")
        gone, stays = (asyncio.ensure_future(arena.allocate_async(1, name)) for name in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        block.free()
        (await stays).free()
        assert gone.cancelled()

    run(job())
    assert arena.used_bytes == 0


# ---- life --------------------------------------------------------------------------------------


def test_an_arena_costs_nothing_before_its_first_lease_and_nothing_after_close() -> None:
    before = resident_bytes()
    arena = arena_of(128 * MIB)
    assert resident_bytes() - before < 8 * MIB
    block = arena.allocate(PAGE_BYTES, "first")
    assert resident_bytes() - before > 120 * MIB
    block.free()
    del block
    assert resident_bytes() - before > 120 * MIB  # reused, not returned
    arena.close()
    assert resident_bytes() - before < 8 * MIB


def test_a_tensor_somebody_kept_stays_readable_after_close() -> None:
    before = resident_bytes()
    arena = arena_of(64 * MIB)
    block = arena.allocate(PAGE_BYTES, "kept")
    kept = block.data[100:200].view(5, 20)
    kept.fill_(42)
    block.free()
    arena.close()
    del arena, block
    gc.collect()
    assert bool((kept == 42).all())
    kept.fill_(43)
    assert bool((kept == 43).all())
    del kept
    assert resident_bytes() - before < 8 * MIB


def test_a_closed_arena_leases_nothing_and_takes_back_what_is_out() -> None:
    arena = arena_of(4 * PAGE_BYTES)
    block = arena.allocate(1, "out")
    arena.close()
    arena.close()
    with pytest.raises(StateError, match="test pool is closed"):
        arena.allocate(1, "late")
    block.free()
    assert arena.used_bytes == 0


# ---- regions -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 9000), max_size=8))
def test_a_region_is_used_up_exactly(sizes: list[int]) -> None:
    region = LinearPool(sum(sizes), CPU)
    parts = [region.allocate(nbytes) for nbytes in sizes]
    for stamp, part in enumerate(parts):
        part.fill_(stamp)
    for stamp, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
        assert part.untyped_storage().nbytes() == nbytes
        assert bool((part == stamp).all())
    with pytest.raises(BudgetError, match=f"{sum(sizes):,} bytes: 1 more"):
        region.allocate(1)


def test_a_region_costs_nothing_until_it_is_written_to_and_is_zero() -> None:
    before = resident_bytes()
    region = LinearPool(64 * MIB, CPU)
    first, rest = region.allocate(4 * MIB), region.allocate(60 * MIB)
    assert resident_bytes() - before < 8 * MIB
    first.fill_(9)
    assert resident_bytes() - before < 16 * MIB
    assert not rest.any()
    region.close()


def test_a_closed_region_gives_its_memory_back_with_the_last_tensor() -> None:
    before = resident_bytes()
    region = LinearPool(64 * MIB, CPU)
    part, rest = region.allocate(MIB), region.allocate(63 * MIB)
    rest.fill_(9)
    del rest
    region.close()
    region.close()
    part.fill_(9)
    assert resident_bytes() - before > 60 * MIB
    with pytest.raises(BudgetError):
        region.allocate(1)
    del part
    assert resident_bytes() - before < 8 * MIB


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("end", ["close", "free_memory"])
def test_memory_is_unregistered_while_it_is_there(end: str) -> None:
    """Once it has gone its address may be somebody else's."""
    found: list[bool] = []

    def register(data: torch.Tensor) -> Callable[[], None]:
        address = data.data_ptr()
        return lambda: found.append(is_mapped(address))

    arena = BlockPool("host", 64 << 20, "nothing", torch.device("cpu"), register=register)
    arena.allocate(4096, "a block").free()
    getattr(arena, end)()
    assert found == [True]
    arena.close()
