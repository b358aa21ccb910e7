"""Planes: one array wherever its bytes lie; what could not be written stays true in memory."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import stranded_in

from offload.array.tiered_array import Disk, Home, TieredArray, await_all
from offload.errors import ConfigError, StateError, StorageError
from offload.io import swapfile
from offload.io.aio import Aio, AioFault, AioOptions, AioStats, open_aio
from offload.io.aio_base import Request
from offload.io.stripes import StripeMap
from offload.io.swapfile import FileRange, SwapSpace
from offload.memory.host_memory import map_host, tensor_over

BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")
PAGE = 4096
SPAN_BYTES = 24
"""Length of the spans of the swap space in memory: most transfers cross a border."""


class MemoryAio(Aio):
    """An engine whose files are arrays; `fails` decides what goes wrong. A loop iteration passes per transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.reason = "memory", "for tests"
        self.files: dict[int, bytearray] = {}
        self.fails: Callable[[Request], bool] = lambda request: False
        self.moves: list[str] = []

    async def _transfer_request(self, request: Request) -> None:
        await asyncio.sleep(0)
        if self.fails(request):
            raise request.error(errno.EIO, request.offset)
        if request.buffer is None:
            return
        self.moves.append(request.op)
        data = self.files.setdefault(request.fd, bytearray(1 << 14))
        here = slice(request.offset, request.offset + request.nbytes)
        if request.op == "read":
            request.buffer.copy_(torch.frombuffer(data[here], dtype=torch.uint8))
        else:
            data[here] = request.buffer.numpy().tobytes()

    def stats(self) -> AioStats:
        raise NotImplementedError

    def inject(self, fault: AioFault | None) -> None:
        raise NotImplementedError

    def _close_backend(self) -> None: ...


class MemorySwap(SwapSpace):
    """Two files without a file system, in stripes of SPAN_BYTES."""

    def __init__(self) -> None:
        self._files = []

    def file_ranges(self, offset: int, nbytes: int) -> Iterator[FileRange]:
        position = offset
        while position < offset + nbytes:
            stripe, inside = divmod(position, SPAN_BYTES)
            length = min(SPAN_BYTES - inside, offset + nbytes - position)
            at = stripe // 2 * SPAN_BYTES + inside
            yield FileRange(stripe % 2, f"drive{stripe % 2}", at, position - offset, length)
            position += length


@dataclass
class Bench:
    """A plane over homes in memory (True) and in the swap space (False), each (length, in memory)."""

    homes: list[tuple[int, bool]]
    width: int = 1
    aio: MemoryAio = field(default_factory=MemoryAio)

    def __post_init__(self) -> None:
        homes, begin, offset = [], 0, 7
        for length, in_memory in self.homes:
            nbytes = length * self.width
            memory = torch.zeros(nbytes, dtype=torch.uint8) if in_memory else None
            homes.append(Home(begin, begin + length, memory, -1 if in_memory else offset))
            begin, offset = begin + length, offset + (0 if in_memory else nbytes + 3)
        self.numel = begin
        self.disk = Disk(self.aio, MemorySwap())
        self.plane = TieredArray("weights", self.width, homes, self.disk)

    def write(self, begin: int, end: int, data: torch.Tensor) -> None:
        asyncio.run(self.plane.write(begin, end, data))

    def read(self, begin: int, end: int) -> torch.Tensor:
        into = torch.full(((end - begin) * self.width,), 99, dtype=torch.uint8)
        asyncio.run(self.plane.read(begin, end, into))
        return into

    def fail_write(self, begin: int, end: int, data: torch.Tensor, fails: Callable[[Request], bool]) -> None:
        """A write that fails, and what the engine then does: strand."""
        self.aio.fails = lambda request: request.op == "write" and fails(request)
        with pytest.raises(StorageError):
            self.write(begin, end, data)
        self.aio.fails = lambda request: False


def values(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 99, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


HOMES = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=6)
RANGES = st.lists(st.tuples(st.integers(0, 240), st.integers(0, 240), st.sampled_from("wwrF")), max_size=12)


def clipped(first: int, second: int, numel: int) -> tuple[int, int]:
    low, high = sorted((first % (numel + 1), second % (numel + 1)))
    return low, high


# ---- the model ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(homes=HOMES, width=st.sampled_from([1, 2, 6]), ranges=RANGES)
def test_writes_then_reads_over_any_homes_are_those_of_one_array(
    homes: list[tuple[int, bool]], width: int, ranges: list[tuple[int, int, str]]
) -> None:
    """Also when some writes fail (F) and what they would have written is stranded."""
    bench = Bench(homes, width)
    model = np.zeros((bench.numel, width), dtype=np.uint8)

    async def job() -> None:
        await bench.plane.write(0, bench.numel, torch.zeros(bench.numel * width, dtype=torch.uint8))
        for step, (first, second, what) in enumerate(ranges):
            begin, end = clipped(first, second, bench.numel)
            into = torch.full(((end - begin) * width,), 99, dtype=torch.uint8)
            if what == "r":
                await bench.plane.read(begin, end, into)
                assert np.array_equal(into.numpy().reshape(-1, width), model[begin:end])
                continue
            data = values((end - begin) * width, step)
            bench.aio.fails = lambda request, what=what: what == "F" and request.fd == 0
            try:
                await bench.plane.write(begin, end, data.clone())
            except StorageError:
                bench.plane.keep_failed_write(begin, end, data.clone())
            bench.aio.fails = lambda request: False
            model[begin:end] = data.numpy().reshape(-1, width)
        everything = torch.empty(bench.numel * width, dtype=torch.uint8)
        await bench.plane.read(0, bench.numel, everything)
        assert np.array_equal(everything.numpy().reshape(-1, width), model)
        await bench.plane.write(0, bench.numel, everything.clone())
        assert stranded_in(bench.plane) == []  # a good write of everything ends every strand
        again = torch.empty_like(everything)
        await bench.plane.read(0, bench.numel, again)
        assert torch.equal(again, everything)

    asyncio.run(job())


@settings(deadline=None)
@given(homes=HOMES, first=st.integers(0, 240), second=st.integers(0, 240), width=st.sampled_from([1, 4]))
def test_memory_is_given_only_when_one_home_holds_the_range_and_swap_bytes_are_the_rest(
    homes: list[tuple[int, bool]], first: int, second: int, width: int
) -> None:
    bench = Bench(homes, width)
    begin, end = clipped(first, second, bench.numel)
    home_of = [(index, in_memory) for index, (length, in_memory) in enumerate(homes) for _ in range(length)]
    touched = set(home_of[begin:end])
    memory = bench.plane.memory(begin, end)
    if len(touched) == 1 and all(in_memory for _, in_memory in touched):
        assert memory is not None and memory.numel() == (end - begin) * width
        memory.fill_(55)
        assert bool((bench.read(begin, end) == 55).all())
    else:
        assert (memory is None) == bool(touched)
    assert bench.plane.swap_bytes(begin, end) == width * sum(not m for _, m in home_of[begin:end])


def test_only_bytes_of_the_swap_space_count_as_traffic() -> None:
    bench = Bench([(10, True), (10, False), (10, True)], width=4)
    bench.write(5, 25, values(80, 0))
    assert (bench.disk.traffic.write_bytes, bench.disk.traffic.read_bytes) == (40, 0)
    bench.read(0, 15)
    assert (bench.disk.traffic.write_bytes, bench.disk.traffic.read_bytes) == (40, 20)


# ---- wrong calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), [(0, 21), (20, 21), (-1, 3), (30, 40)])
def test_a_range_outside_the_plane_raises_before_a_byte_moves(begin: int, end: int) -> None:
    bench = Bench([(10, True), (10, False)])
    before = bench.read(0, 20)
    moves = len(bench.aio.moves)
    for call in (bench.plane.write, bench.plane.read):
        with pytest.raises(StateError, match=r"weights.*outside its 20 elements"):
            asyncio.run(call(begin, end, values(end - begin, 1)))
    assert len(bench.aio.moves) == moves
    assert torch.equal(bench.read(0, 20), before)


@pytest.mark.parametrize("nbytes", [0, 39, 41])
def test_a_buffer_of_another_length_raises_before_a_byte_moves(nbytes: int) -> None:
    bench = Bench([(10, True), (10, False)], width=4)
    for call in (bench.plane.write, bench.plane.read):
        with pytest.raises(StateError, match=rf"40 bytes, got a buffer of {nbytes}"):
            asyncio.run(call(5, 15, values(nbytes, 1)))
    assert bench.aio.moves == []


def test_a_plane_with_a_home_in_the_swap_space_needs_one() -> None:
    with pytest.raises(StateError, match="swap space"):
        TieredArray("states", 1, [Home(0, 4, None, 0)], None)


def test_a_closed_plane_holds_nothing_and_gives_nothing() -> None:
    bench = Bench([(10, True), (10, False)])
    bench.plane.close()
    assert bench.plane.numel == 0
    with pytest.raises(StateError):
        bench.read(0, 1)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("length", [1, 20, 30])
def test_the_front_of_a_home_is_written_alone(in_memory: bool, length: int) -> None:
    bench = Bench([(10, not in_memory), (30, in_memory)])
    truth = values(40, 0)
    bench.write(0, 40, truth)
    truth[10 : 10 + length] = values(length, 1)
    asyncio.run(bench.plane.write_front(10, 40, truth[10 : 10 + length].clone()))
    assert torch.equal(bench.read(0, 40), truth)


def test_a_part_of_a_record_is_read_and_written_alone_and_only_on_the_disk() -> None:
    bench = Bench([(10, True), (30, False), (10, True)])
    truth = values(50, 0)
    bench.write(0, 50, truth)
    truth[15:27] = values(12, 1)
    into = torch.empty(12, dtype=torch.uint8)
    before = bench.disk.traffic.write_bytes
    asyncio.run(bench.plane.write_part(10, 40, 5, truth[15:27].clone()))
    asyncio.run(bench.plane.read_part(10, 40, 5, into))
    assert torch.equal(into, truth[15:27]) and torch.equal(bench.read(0, 50), truth)
    assert bench.disk.traffic.write_bytes - before == 12
    for begin, end in ((0, 10), (10, 39), (40, 50)):
        with pytest.raises(StateError, match=r"weights: .* is not an optimizer state in swap space"):
            asyncio.run(bench.plane.write_part(begin, end, 0, into))


def test_a_part_of_a_record_that_could_not_be_written_is_read_from_memory_and_not_written_alone() -> None:
    bench = Bench([(30, False)])
    bench.write(0, 30, values(30, 0))
    truth, into = values(30, 1), torch.empty(12, dtype=torch.uint8)
    bench.fail_write(0, 30, truth, lambda request: True)
    bench.plane.keep_failed_write(0, 30, truth.clone())
    asyncio.run(bench.plane.read_part(0, 30, 5, into))
    assert torch.equal(into, truth[5:17])
    assert not bench.plane.can_write_part(0, 30)
    with pytest.raises(StateError, match=r"weights: \[0, 30\) can only be written as a whole"):
        asyncio.run(bench.plane.write_part(0, 30, 5, into))
    asyncio.run(bench.plane.retry_failed_writes())
    assert bench.plane.can_write_part(0, 30)


# ---- failed writes -----------------------------------------------------------------------------


@pytest.fixture
def stranded() -> tuple[Bench, torch.Tensor]:
    """[10, 30) of 50 coordinates in the swap space could not be written: (bench, the truth)."""
    bench = Bench([(50, False)])
    truth = values(50, 0)
    bench.write(0, 50, truth)
    truth[10:30] = values(20, 1)
    bench.fail_write(10, 30, truth[10:30], lambda request: True)
    bench.plane.keep_failed_write(10, 30, truth[10:30].clone())
    return bench, truth


@pytest.mark.parametrize(("begin", "end"), [(10, 30), (12, 20), (0, 11), (29, 50), (0, 50), (0, 10), (30, 50)])
def test_reads_return_what_could_not_be_written(stranded: tuple[Bench, torch.Tensor], begin: int, end: int) -> None:
    bench, truth = stranded
    assert torch.equal(bench.read(begin, end), truth[begin:end])
    assert stranded_in(bench.plane) == [(10, 30)]


def test_a_read_of_what_is_stranded_needs_no_disk(stranded: tuple[Bench, torch.Tensor]) -> None:
    bench, truth = stranded
    bench.aio.fails = lambda request: True
    assert torch.equal(bench.read(11, 29), truth[11:29])


@pytest.mark.parametrize(("begin", "end"), [(10, 30), (0, 50), (5, 30), (10, 31)])
def test_a_good_write_over_all_of_it_ends_it_once(stranded: tuple[Bench, torch.Tensor], begin: int, end: int) -> None:
    bench, truth = stranded
    for seed in (5, 6):
        truth[begin:end] = values(end - begin, seed)
        bench.write(begin, end, truth[begin:end])
        assert stranded_in(bench.plane) == []
        bench.aio.moves.clear()
        assert torch.equal(bench.read(0, 50), truth)
        assert "read" in bench.aio.moves  # from the disk again


@pytest.mark.parametrize(("begin", "end"), [(10, 29), (11, 30), (0, 12), (15, 16), (28, 50)])
def test_a_good_write_over_part_of_it_updates_it(stranded: tuple[Bench, torch.Tensor], begin: int, end: int) -> None:
    bench, truth = stranded
    truth[begin:end] = values(end - begin, 5)
    bench.write(begin, end, truth[begin:end])
    assert stranded_in(bench.plane) == [(10, 30)]
    assert torch.equal(bench.read(0, 50), truth)
    assert torch.equal(bench.read(10, 30), truth[10:30])


def test_a_front_is_refused_while_something_is_stranded(stranded: tuple[Bench, torch.Tensor]) -> None:
    bench, truth = stranded
    with pytest.raises(StateError, match=r"weights: \[0, 50\) can only be written as a whole"):
        asyncio.run(bench.plane.write_front(0, 50, values(12, 5)))
    assert torch.equal(bench.read(0, 50), truth)


@pytest.mark.parametrize("rewrite_first", [True, False], ids=["rewrite first", "write first"])
@pytest.mark.parametrize("slow", [0, 1], ids=["first is slow", "second is slow"])
@pytest.mark.parametrize(("begin", "end"), [(10, 30), (0, 50), (12, 20), (5, 15), (25, 40)])
def test_a_write_beside_a_rewrite_is_the_newest(
    stranded: tuple[Bench, torch.Tensor], begin: int, end: int, slow: int, rewrite_first: bool
) -> None:
    """Whichever of the two the disk completes last."""
    bench, truth = stranded
    truth[begin:end] = values(end - begin, 5)
    move, number = bench.aio._transfer_request, ContextVar[int]("number")

    async def delayed(request: Request) -> None:
        await asyncio.sleep(0.02 if number.get() == slow else 0)
        await move(request)

    async def job(position: int, work: Coroutine[Any, Any, None]) -> None:
        number.set(position)
        await work

    async def both() -> None:
        jobs = [bench.plane.retry_failed_writes(), bench.plane.write(begin, end, truth[begin:end].clone())]
        await asyncio.gather(*(job(n, work) for n, work in enumerate(jobs if rewrite_first else reversed(jobs))))
        bench.aio._transfer_request = move  # type: ignore[method-assign]

    bench.aio._transfer_request = delayed  # type: ignore[method-assign]
    asyncio.run(both())
    assert stranded_in(bench.plane) == []
    assert torch.equal(bench.read(0, 50), truth)


@pytest.mark.parametrize(("begin", "end"), [(10, 30), (0, 50), (5, 35), (12, 50), (0, 20)])
def test_a_read_beside_a_rewrite_is_the_truth(stranded: tuple[Bench, torch.Tensor], begin: int, end: int) -> None:
    """The disk gives its bytes from before the rewrite, and completes the read after it."""
    bench, truth = stranded
    move, into = bench.aio._transfer_request, torch.zeros(end - begin, dtype=torch.uint8)

    async def late(request: Request) -> None:
        await move(request)
        if request.op == "read":
            await asyncio.sleep(0.02)

    async def both() -> None:
        reading = asyncio.create_task(bench.plane.read(begin, end, into))
        await asyncio.sleep(0.005)
        await bench.plane.retry_failed_writes()
        await reading

    bench.aio._transfer_request = late  # type: ignore[method-assign]
    asyncio.run(both())
    assert stranded_in(bench.plane) == []
    assert torch.equal(into, truth[begin:end])


@pytest.mark.parametrize(("begin", "end"), [(10, 30), (5, 35), (12, 20), (0, 15), (25, 40)])
def test_a_write_that_fails_again_keeps_the_newest(stranded: tuple[Bench, torch.Tensor], begin: int, end: int) -> None:
    bench, truth = stranded
    truth[begin:end] = values(end - begin, 7)
    bench.fail_write(begin, end, truth[begin:end], lambda request: True)
    bench.plane.keep_failed_write(begin, end, truth[begin:end].clone())
    replaced = begin <= 10 and end >= 30
    assert stranded_in(bench.plane) == [*([] if replaced else [(10, 30)]), (begin, end)]
    assert torch.equal(bench.read(0, 50), truth)
    bench.write(0, 50, truth)
    assert stranded_in(bench.plane) == []
    assert torch.equal(bench.read(0, 50), truth)


def test_a_failed_write_that_nobody_stranded_leaves_the_older_truth(
    stranded: tuple[Bench, torch.Tensor],
) -> None:
    bench, truth = stranded
    bench.fail_write(10, 30, values(20, 9), lambda request: request.fd == 1)
    assert stranded_in(bench.plane) == [(10, 30)]
    assert torch.equal(bench.read(10, 30), truth[10:30])


def test_what_is_stranded_over_several_homes_ends_with_one_good_write() -> None:
    bench = Bench([(10, False), (10, True), (10, False)])
    data = values(20, 1)
    bench.fail_write(5, 25, data, lambda request: True)
    bench.plane.keep_failed_write(5, 25, data.clone())
    assert torch.equal(bench.read(5, 25), data)
    bench.write(5, 25, data)
    assert stranded_in(bench.plane) == []
    assert torch.equal(bench.read(5, 25), data)


def test_bytes_changed_in_a_memory_home_are_the_truth_there_whatever_was_stranded() -> None:
    bench = Bench([(10, False), (10, True)])
    data = values(20, 1)
    bench.fail_write(0, 20, data, lambda request: True)
    bench.plane.keep_failed_write(0, 20, data.clone())
    memory = bench.plane.memory(10, 20)
    assert memory is not None
    memory.fill_(3)
    assert bench.read(0, 20).tolist() == data[:10].tolist() + [3] * 10


def test_a_failure_counts_as_no_traffic_and_names_file_and_offset() -> None:
    bench = Bench([(100, False)])
    bench.aio.fails = lambda request: request.fd == 1
    with pytest.raises(StorageError) as caught:
        bench.write(0, 100, values(100, 0))
    # Coordinate 0 lies at byte 7 of the space, so the second span is the first of drive1.
    assert (caught.value.path, caught.value.offset, caught.value.errno) == ("drive1", 0, errno.EIO)
    assert bench.disk.traffic.write_bytes == 0


@pytest.mark.parametrize("newer", [(10, 30), (15, 20), (0, 15), (25, 50), (35, 40)])
def test_what_is_stranded_is_rewritten_on_request_with_the_newest_on_top(
    stranded: tuple[Bench, torch.Tensor], newer: tuple[int, int]
) -> None:
    bench, truth = stranded
    begin, end = newer
    truth[begin:end] = values(end - begin, 8)
    bench.plane.keep_failed_write(begin, end, truth[begin:end].clone())
    asyncio.run(bench.plane.retry_failed_writes())
    assert stranded_in(bench.plane) == []
    bench.aio.moves.clear()
    assert torch.equal(bench.read(0, 50), truth)
    assert set(bench.aio.moves) == {"read"}
    asyncio.run(bench.plane.retry_failed_writes())  # nothing is left to do
    assert set(bench.aio.moves) == {"read"}


def test_a_rewrite_tries_everything_and_raises_what_failed(stranded: tuple[Bench, torch.Tensor]) -> None:
    bench, truth = stranded
    truth[40:45] = values(5, 8)
    bench.plane.keep_failed_write(40, 45, truth[40:45].clone())
    failing = True

    def fails_once(request: Request) -> bool:
        nonlocal failing
        now, failing = failing, False
        return now

    bench.aio.fails = fails_once
    with pytest.raises(StorageError):
        asyncio.run(bench.plane.retry_failed_writes())
    assert stranded_in(bench.plane) == [(10, 30)]
    assert torch.equal(bench.read(0, 50), truth)


# ---- several moves -----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1, 2}])
def test_an_error_is_raised_only_after_every_move_has_settled(failing: set[int]) -> None:
    settled: list[int] = []

    async def move(index: int) -> None:
        for _ in range(3 * index):
            await asyncio.sleep(0)
        settled.append(index)
        if index in failing:
            raise StorageError(f"move {index}", errno=errno.EIO, path="f", offset=0, free_bytes=None)

    with pytest.raises(StorageError, match=f"move {min(failing)}"):
        asyncio.run(await_all([move(index) for index in range(3)]))
    assert settled == [0, 1, 2]


def test_a_cancelled_caller_waits_for_every_move() -> None:
    settled: list[int] = []

    async def move(index: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            settled.append(index)

    async def job() -> None:
        task = asyncio.ensure_future(await_all([move(index) for index in range(3)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert settled == [0, 1, 2]

    asyncio.run(job())


@pytest.mark.parametrize("count", [0, 1, 4])
def test_moves_that_all_succeed_return_nothing(count: int) -> None:
    async def move() -> None:
        await asyncio.sleep(0)

    moves: list[Coroutine[Any, Any, None]] = [move() for _ in range(count)]
    assert asyncio.run(await_all(moves)) is None  # type: ignore[func-returns-value]


# ---- on a real disk ----------------------------------------------------------------------------


@pytest.fixture(params=BACKENDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Two striped files under each backend of this machine."""
    monkeypatch.setattr(swapfile, "StripeMap", functools.partial(StripeMap, stripe_bytes=2 * PAGE))
    try:
        aio = open_aio(AioOptions(backend=request.param, chunk_bytes=PAGE, queue_depth=4, threads=2))
    except ConfigError as missing:
        pytest.skip(str(missing))
    (tmp_path / "second").mkdir()
    swap = SwapSpace([tmp_path, tmp_path / "second"], 64 * PAGE)
    yield Disk(aio, swap)
    aio.close()
    swap.close()


def test_every_backend_stores_and_returns_the_plane(disk: Disk) -> None:
    host = torch.zeros(8 * PAGE, dtype=torch.uint8)
    plane = TieredArray("states", 1, [Home(0, 20 * PAGE, None, PAGE), Home(20 * PAGE, 28 * PAGE, host)], disk)
    data, back = (tensor_over(map_host(28 * PAGE)) for _ in range(2))
    data.copy_(values(28 * PAGE, 3))

    async def job() -> None:
        await plane.write(0, 28 * PAGE, data)
        await plane.read(0, 28 * PAGE, back)
        assert torch.equal(back, data)
        await plane.read(3 * PAGE, 22 * PAGE, back[: 19 * PAGE])
        assert torch.equal(back[: 19 * PAGE], data[3 * PAGE : 22 * PAGE])

    asyncio.run(job())


def test_an_injected_fault_surfaces_with_path_and_offset_and_the_stranded_truth_survives(disk: Disk) -> None:
    plane = TieredArray("states", 1, [Home(0, 20 * PAGE, None, 0)], disk)
    old, new, back = (tensor_over(map_host(20 * PAGE)) for _ in range(3))
    old.copy_(values(20 * PAGE, 3))
    new.copy_(values(20 * PAGE, 4))

    async def job() -> None:
        await plane.write(0, 20 * PAGE, old)
        disk.aio.inject(AioFault(errno=errno.ENOSPC, fail_rate=1.0, ops=("write",), skip=4, count_max=1))
        with pytest.raises(StorageError) as caught:
            await plane.write(0, 20 * PAGE, new)
        error = caught.value
        assert error.errno == errno.ENOSPC and error.path in disk.swap.paths
        assert error.offset % PAGE == 0 and 0 <= error.offset < 10 * PAGE
        assert error.free_bytes is not None and error.path in str(error) and "ENOSPC" in str(error)
        assert disk.aio.in_flight() == []
        plane.keep_failed_write(0, 20 * PAGE, new.clone())
        await plane.read(PAGE, 20 * PAGE, back[: 19 * PAGE])
        assert torch.equal(back[: 19 * PAGE], new[PAGE:])
        disk.aio.inject(None)
        await plane.write(0, 20 * PAGE, new)
        assert stranded_in(plane) == []
        await plane.read(0, 20 * PAGE, back)
        assert torch.equal(back, new)

    asyncio.run(job())
