"""The native I/O engine keeps its contract on every backend, with and without injected faults."""

from __future__ import annotations

import errno
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import native

READ, WRITE, SYNC = 0, 1, 2
BACKENDS = {"io_uring": 0, "libaio": 1, "threads": 2}
CHUNK = 4096
SECOND_NS = 10**9
ALWAYS = 1 << 16
ALL_OPS = 0b111

ABSORBED = {
    "no fault": {},
    "EINTR": {"status": -errno.EINTR, "fail_rate": ALWAYS // 3},
    "EAGAIN": {"status": -errno.EAGAIN, "fail_rate": ALWAYS // 3},
    "short": {"short_rate": ALWAYS // 2},
    "delay": {"delay_rate": ALWAYS // 4, "delay_us": 300},
    "everything": {
        "status": -errno.EINTR,
        **{"fail_rate": ALWAYS // 5, "short_rate": ALWAYS // 4, "delay_rate": ALWAYS // 5, "delay_us": 200},
    },
}


class Engine:
    """One open engine; keeps the buffers of its requests alive."""

    def __init__(self, zn: Any, handle: Any) -> None:
        self.ffi, self.lib, self.handle = zn.ffi, zn.lib, handle
        self.buffers: list[np.ndarray] = []
        self.is_open, self.in_flight = True, 0

    def submit(self, *requests: tuple[int, int, int, int, np.ndarray | None]) -> int:
        """Each request: tag, op, fd, offset, uint8 buffer."""
        array = self.ffi.new("zn_aio_request[]", len(requests))
        for slot, (tag, op, fd, offset, buffer) in zip(array, requests, strict=True):
            slot.tag, slot.op, slot.fd, slot.offset = tag, op, fd, offset
            if buffer is not None:
                self.buffers.append(buffer)
                slot.nbytes, slot.buffer = buffer.nbytes, self.ffi.cast("void *", buffer.ctypes.data)
        status = int(self.lib.zn_aio_submit(self.handle, array, len(requests)))
        self.in_flight += len(requests) if status == 0 else 0
        return status

    def take(self, most: int = 64, timeout_ns: int | None = None) -> list[Any]:
        out = self.ffi.new("zn_aio_completion[]", most)
        if timeout_ns is None:
            count = self.lib.zn_aio_poll(self.handle, out, most)
        else:
            assert self.is_readable(timeout_ns // 10**6), "the engine hangs"
            count = self.lib.zn_aio_poll(self.handle, out, most)
        self.keep = out
        self.in_flight -= count
        return [out[i] for i in range(count)]

    def drain(self) -> dict[int, tuple[int, int, int]]:
        """tag -> (status, nbytes, fail_offset) of everything in flight; no tag may come twice."""
        done: dict[int, tuple[int, int, int]] = {}
        while self.in_flight:
            for completion in self.take(timeout_ns=20 * SECOND_NS):
                assert completion.tag not in done
                done[completion.tag] = (completion.status, completion.nbytes, completion.fail_offset)
        return done

    def run(self, *requests: tuple[int, int, int, int, np.ndarray | None]) -> dict[int, tuple[int, int, int]]:
        assert self.submit(*requests) == 0
        return self.drain()

    def inject(self, **plan: int) -> None:
        plan.setdefault("op_mask", ALL_OPS)
        assert self.lib.zn_aio_inject(self.handle, self.ffi.new("zn_aio_fault *", plan)) == 0

    def stats(self) -> Any:
        out = self.ffi.new("zn_aio_stats *")
        assert self.lib.zn_aio_stats_get(self.handle, out) == 0
        return out

    def is_readable(self, timeout_ms: int = 0) -> bool:
        poller = select.poll()
        poller.register(self.lib.zn_aio_event_fd(self.handle), select.POLLIN)
        return bool(poller.poll(timeout_ms))

    def close(self) -> int:
        status = int(self.lib.zn_aio_close(self.handle))
        self.is_open = status != 0
        return status


@pytest.fixture(scope="module")
def zn() -> Any:
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(f"no native library: {error.reason}")


@pytest.fixture(params=BACKENDS)
def start_engine(request: pytest.FixtureRequest, zn: Any) -> Iterator[Callable[..., Engine]]:
    backend = BACKENDS[request.param]
    status = zn.lib.zn_aio_probe(backend)
    if status != 0:
        pytest.skip(f"{request.param}: {zn.ffi.string(zn.lib.zn_strerror(status)).decode()}")
    engines: list[Engine] = []

    def open_one(**options: int) -> Engine:
        chosen = {"queue_depth": 4, "threads": 2, "requests_max": 512, "chunk_bytes": CHUNK, "backend": backend}
        out = zn.ffi.new("zn_aio **")
        assert zn.lib.zn_aio_open(out, zn.ffi.new("zn_aio_options *", {**chosen, **options})) == 0
        engines.append(Engine(zn, out[0]))
        return engines[-1]

    yield open_one
    for engine in engines:
        if engine.is_open:
            engine.drain()
            assert engine.close() == 0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def contents(fd: int) -> np.ndarray:
    return np.frombuffer(os.pread(fd, os.fstat(fd).st_size, 0), dtype=np.uint8)


# ---- full or with an errno ---------------------------------------------------------------------


extents = st.lists(
    st.tuples(st.integers(0, 3 * CHUNK), st.one_of(st.integers(0, 3 * CHUNK), st.integers(0, 12 * CHUNK))),
    min_size=1,
    max_size=12,
)
"""(gap, nbytes): disjoint and unaligned; some are longer than the queue is deep."""


@pytest.mark.parametrize("fault", ABSORBED)
def test_every_byte_arrives_whatever_the_sizes_and_the_absorbed_faults(
    start_engine: Callable[..., Engine], file: int, fault: str
) -> None:
    engine = start_engine()

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(extents=extents, seed=st.integers(0, 2**32))
    def holds(extents: list[tuple[int, int]], seed: int) -> None:
        os.ftruncate(file, 0)
        engine.inject(seed=seed, **ABSORBED[fault])
        wanted, offset, offsets = noise(sum(map(sum, extents)), seed), 0, []
        for gap, nbytes in extents:
            wanted[offset : offset + gap] = 0
            offsets.append(offset + gap)
            offset += gap + nbytes
        sizes = [nbytes for _, nbytes in extents]
        spans = [wanted[begin : begin + nbytes] for begin, nbytes in zip(offsets, sizes, strict=True)]
        writes = [(i, WRITE, file, offsets[i], spans[i]) for i in range(len(spans))]
        assert engine.run(*writes) == {i: (0, sizes[i], -1) for i in range(len(sizes))}
        end = max((begin + nbytes for begin, nbytes in zip(offsets, sizes, strict=True) if nbytes), default=0)
        assert np.array_equal(contents(file), wanted[:end])
        reads = [(i, READ, file, offsets[i], np.zeros(sizes[i], np.uint8)) for i in range(len(spans))]
        assert engine.run(*reads) == {i: (0, sizes[i], -1) for i in range(len(sizes))}
        assert all(np.array_equal(read[4], span) for read, span in zip(reads, spans, strict=True))
        engine.buffers.clear()

    holds()


@pytest.mark.parametrize("fault", ABSORBED)
@pytest.mark.parametrize("flags", ["ZN_AIO_SINGLE_SUBMIT", "ZN_AIO_IN_WAVES"])
def test_ways_of_submitting_move_the_same_bytes(
    start_engine: Callable[..., Engine], zn: Any, file: int, flags: str, fault: str
) -> None:
    engine = start_engine(flags=getattr(zn.lib, flags))
    engine.inject(seed=7, **ABSORBED[fault])
    wanted = noise(37 * CHUNK + 5)
    assert engine.run((0, WRITE, file, 0, wanted)) == {0: (0, wanted.nbytes, -1)}
    got = np.zeros_like(wanted)
    halves = [(1, READ, file, 0, got[: 20 * CHUNK]), (2, READ, file, 20 * CHUNK, got[20 * CHUNK :])]
    assert engine.run(*halves) == {1: (0, 20 * CHUNK, -1), 2: (0, 17 * CHUNK + 5, -1)}
    assert np.array_equal(got, wanted)


def test_a_queue_of_one_serves_requests_in_the_order_they_came(start_engine: Callable[..., Engine], file: int) -> None:
    os.pwrite(file, noise(64 * CHUNK).tobytes(), 0)
    engine = start_engine(queue_depth=1, threads=1)
    order = list(engine.run(*((tag, READ, file, 0, np.zeros((9 - tag) * CHUNK, np.uint8)) for tag in range(8))))
    assert order == list(range(8))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", [READ, WRITE])
@pytest.mark.parametrize("chunk", [0, 1, 6, 9])
def test_a_failing_chunk_fails_its_request_once_and_leaves_the_neighbours_alone(
    start_engine: Callable[..., Engine], file: int, code: int, op: int, chunk: int
) -> None:
    os.pwrite(file, noise(64 * CHUNK).tobytes(), 0)
    engine = start_engine()
    engine.inject(status=-code, fail_rate=ALWAYS, skip=chunk, count_max=1, op_mask=1 << op)
    guarded = np.full(12 * CHUNK, 0xAB, np.uint8)
    other = {READ: WRITE, WRITE: READ}[op]
    neighbours = [noise(3 * CHUNK, seed) for seed in (1, 2)]
    done = engine.run(
        (0, other, file, 32 * CHUNK, neighbours[0]),
        (1, op, file, 100, guarded[CHUNK : 11 * CHUNK]),
        (2, other, file, 40 * CHUNK, neighbours[1]),
    )
    status, nbytes, fail_offset = done.pop(1)
    assert (status, fail_offset) == (-code, 100 + chunk * CHUNK)
    assert nbytes < 10 * CHUNK
    assert done == {0: (0, 3 * CHUNK, -1), 2: (0, 3 * CHUNK, -1)}
    assert (guarded[:CHUNK] == 0xAB).all() and (guarded[11 * CHUNK :] == 0xAB).all()
    for at, neighbour in zip((32, 40), neighbours, strict=True):
        assert np.array_equal(contents(file)[at * CHUNK :][: 3 * CHUNK], neighbour)
    assert engine.run((3, op, file, 0, guarded)) == {3: (0, 12 * CHUNK, -1)}


def test_a_failed_read_completes_only_after_its_last_chunk_has_stopped(
    start_engine: Callable[..., Engine], file: int
) -> None:
    chunks, chunk_bytes = 8, 1 << 20
    os.pwrite(file, bytes(chunks * chunk_bytes), 0)
    engine = start_engine(chunk_bytes=chunk_bytes, queue_depth=chunks)
    buffer = np.ones(chunks * chunk_bytes, np.uint8)
    for _ in range(10):
        engine.inject(status=-errno.EIO, fail_rate=ALWAYS, skip=chunks - 1)
        assert engine.submit((0, READ, file, 0, buffer)) == 0
        assert engine.take(timeout_ns=20 * SECOND_NS)[0].status == -errno.EIO
        buffer[:] = 1
        time.sleep(0.002)
        assert buffer.all()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_retries_are_counted_and_bounded(start_engine: Callable[..., Engine], file: int, code: int) -> None:
    engine = start_engine()
    data = noise(CHUNK)
    engine.inject(status=-code, fail_rate=ALWAYS, count_max=7)
    assert engine.run((0, WRITE, file, 0, data)) == {0: (0, CHUNK, -1)}
    assert engine.stats().retried == 7
    engine.inject(status=-code, fail_rate=ALWAYS)
    assert engine.run((1, WRITE, file, 0, data)) == {1: (-code, 0, 0)}
    assert 7 + 10 <= engine.stats().retried <= 7 + 1000


@pytest.mark.parametrize("size", [0, 1, 3 * CHUNK, 5 * CHUNK + 7])
def test_the_end_of_the_file_inside_a_read_is_enodata_at_that_byte(
    start_engine: Callable[..., Engine], file: int, size: int
) -> None:
    os.pwrite(file, noise(size).tobytes(), 0)
    for fault in ABSORBED.values():
        engine = start_engine()
        engine.inject(**fault)
        buffer = np.zeros(9 * CHUNK, np.uint8)
        assert engine.run((0, READ, file, 0, buffer)) == {0: (-errno.ENODATA, size, size)}
        assert np.array_equal(buffer[:size], noise(size))


def test_errors_of_the_kernel_are_reported_as_they_are(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    path = tmp_path / "read_only"
    path.write_bytes(bytes(4 * CHUNK))
    engine = start_engine()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert engine.run((0, WRITE, fd, CHUNK, noise(2 * CHUNK))) == {0: (-errno.EBADF, 0, CHUNK)}
        assert engine.run((1, READ, fd, CHUNK, noise(2 * CHUNK))) == {1: (0, 2 * CHUNK, -1)}
    finally:
        os.close(fd)


def test_sync_succeeds_and_its_failure_is_reported(start_engine: Callable[..., Engine], file: int) -> None:
    engine = start_engine()
    assert engine.run((0, WRITE, file, 0, noise(CHUNK)), (1, SYNC, file, 0, None))[1] == (0, 0, -1)
    engine.inject(status=-errno.EIO, fail_rate=ALWAYS, op_mask=1 << SYNC)
    assert engine.run((2, SYNC, file, 0, None)) == {2: (-errno.EIO, 0, 0)}


# ---- O_DIRECT ----------------------------------------------------------------------------------


@pytest.fixture
def direct_file(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"{tmp_path} has no O_DIRECT: {error}")
    yield fd
    os.close(fd)


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 4096, np.uint8)
    begin = -raw.ctypes.data % 4096
    return raw[begin : begin + nbytes]


@pytest.mark.parametrize("fault", ABSORBED)
def test_direct_files_survive_short_counts_that_are_not_aligned(
    start_engine: Callable[..., Engine], direct_file: int, fault: str
) -> None:
    nbytes = 24 * CHUNK
    data, back = aligned(nbytes), aligned(nbytes)
    for seed in range(8):
        data[:], back[:] = noise(nbytes, seed), 0
        engine = start_engine(chunk_bytes=5 * CHUNK)
        engine.inject(seed=seed, **ABSORBED[fault])
        assert engine.run((0, WRITE, direct_file, CHUNK, data)) == {0: (0, nbytes, -1)}
        assert engine.run((0, READ, direct_file, CHUNK, back)) == {0: (0, nbytes, -1)}
        assert np.array_equal(back, data)


@pytest.mark.parametrize("size", [2 * CHUNK, 2 * CHUNK + 512, 2 * CHUNK + 777])
@pytest.mark.parametrize("fault", ["no fault", "short"])
def test_the_end_of_a_direct_file_is_found_at_its_byte(
    start_engine: Callable[..., Engine], direct_file: int, size: int, fault: str
) -> None:
    os.ftruncate(direct_file, size)
    engine = start_engine(chunk_bytes=8 * CHUNK)
    engine.inject(**ABSORBED[fault])
    assert engine.run((0, READ, direct_file, 0, aligned(4 * CHUNK))) == {0: (-errno.ENODATA, size, size)}


# ---- the table, completions, waiting -----------------------------------------------------------


def test_submit_takes_all_or_none_when_the_table_is_full(start_engine: Callable[..., Engine], file: int) -> None:
    engine = start_engine(requests_max=4)
    engine.inject(delay_rate=ALWAYS, delay_us=20_000)

    def writes(*tags: int) -> list[tuple[int, int, int, int, np.ndarray]]:
        return [(tag, WRITE, file, tag * 10, noise(10, tag)) for tag in tags]

    assert engine.submit(*writes(0, 1, 2)) == 0
    assert engine.submit(*writes(3, 4)) == -errno.EAGAIN
    assert engine.submit(*writes(5)) == 0
    assert engine.submit(*writes(6)) == -errno.EAGAIN
    assert engine.is_readable(10_000)
    assert engine.submit(*writes(7)) == -errno.EAGAIN, "a completion nobody took still has its place"
    assert set(engine.drain()) == {0, 1, 2, 5}
    assert set(engine.run(*writes(8, 9, 10, 11))) == {8, 9, 10, 11}
    assert not contents(file)[30:50].any(), "a refused request must not run"


def test_one_bad_request_refuses_its_whole_batch(start_engine: Callable[..., Engine], file: int) -> None:
    engine, data = start_engine(), noise(10)
    bad_ones = [(1, READ, -1, 0, data), (1, 7, file, 0, data), (1, WRITE, file, -1, data)]
    for bad in (*bad_ones, (1, WRITE, file, 2**63 - 5, data)):
        assert engine.submit((0, WRITE, file, 0, data), bad) == -errno.EINVAL
    assert engine.close() == 0, "a refused request is not in flight"
    assert os.fstat(file).st_size == 0


def test_the_event_descriptor_is_readable_exactly_while_completions_wait(
    start_engine: Callable[..., Engine], file: int
) -> None:
    engine = start_engine()
    for finished in (3, 6, 9):
        assert not engine.is_readable()
        assert engine.submit(*((tag, WRITE, file, 0, noise(tag)) for tag in (0, 5, 0))) == 0
        while engine.stats().requests < finished:
            time.sleep(0.001)
        for left in (2, 1, 0):
            assert engine.is_readable()
            assert len(engine.take(1)) == 1
            assert engine.is_readable() == (left > 0)
        assert engine.take() == []


def test_close_refuses_while_anything_is_in_flight_and_harms_nothing(
    start_engine: Callable[..., Engine], file: int
) -> None:
    engine = start_engine()
    engine.inject(delay_rate=ALWAYS, delay_us=20_000)
    data = noise(3 * CHUNK)
    assert engine.submit((0, WRITE, file, 0, data)) == 0
    assert engine.close() == -errno.EBUSY
    assert engine.is_readable(10_000)
    assert engine.close() == -errno.EBUSY, "a completion that was not taken is in flight"
    assert engine.drain() == {0: (0, 3 * CHUNK, -1)}
    assert engine.close() == 0
    assert np.array_equal(contents(file), data)


def test_the_engine_goes_on_while_nobody_asks(start_engine: Callable[..., Engine], file: int) -> None:
    engine = start_engine(queue_depth=2)
    data = noise(300)
    assert engine.submit(*((tag, WRITE, file, tag * 300, data) for tag in range(100))) == 0
    limit = time.monotonic() + 20
    while engine.stats().requests < 100 and time.monotonic() < limit:
        time.sleep(0.001)
    assert engine.stats().requests == 100
    assert len(engine.drain()) == 100


def test_statistics_count_what_moved(start_engine: Callable[..., Engine], file: int) -> None:
    engine = start_engine()
    engine.run((0, WRITE, file, 0, noise(10 * CHUNK + 1)), (1, SYNC, file, 0, None))
    engine.run((0, READ, file, 0, noise(2 * CHUNK)), (1, READ, file, 0, noise(0)))
    stats = engine.stats()
    assert (stats.write_bytes, stats.read_bytes) == (10 * CHUNK + 1, 2 * CHUNK)
    assert (stats.requests, stats.chunks, stats.resumed, stats.retried) == (4, 11 + 1 + 2, 0, 0)
    assert 0 < stats.read_ns < stats.busy_ns and 0 < stats.write_ns < stats.busy_ns
    assert stats.busy_ns <= stats.read_ns + stats.write_ns + SECOND_NS
    engine.inject(short_rate=ALWAYS, count_max=5)
    engine.run((0, READ, file, 0, noise(10 * CHUNK)))
    assert engine.stats().resumed == 5


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": 3},
        {"backend": -1},
        {"queue_depth": 0},
        {"queue_depth": 4097},
        {"threads": 0},
        {"threads": 65},
        {"requests_max": 0},
        {"flags": 4},
        {"requests_max": 65537},
        {"chunk_bytes": 0},
        {"chunk_bytes": 4095},
        {"chunk_bytes": -4096},
    ],
)
def test_an_option_out_of_range_is_refused(zn: Any, wrong: dict[str, int]) -> None:
    good = {"backend": BACKENDS["threads"], "queue_depth": 4, "threads": 2, "requests_max": 4, "chunk_bytes": CHUNK}
    out = zn.ffi.new("zn_aio **")
    assert zn.lib.zn_aio_open(out, zn.ffi.new("zn_aio_options *", {**good, **wrong})) == -errno.EINVAL
    assert zn.lib.zn_aio_probe(wrong.get("backend", 3)) == -errno.EINVAL


@pytest.mark.parametrize(
    "wrong",
    [
        {"fail_rate": ALWAYS + 1, "status": -errno.EIO},
        {"short_rate": -1},
        {"fail_rate": 1, "status": 0},
        {"fail_rate": 1, "status": 5},
        {"delay_us": -1},
        {"skip": -1},
        {"count_max": -1},
        {"begin": -1, "end": 1},
        {"begin": 4096, "end": 4096},
    ],
)
def test_a_fault_plan_that_makes_no_sense_is_refused(
    start_engine: Callable[..., Engine], wrong: dict[str, int]
) -> None:
    engine = start_engine()
    plan = engine.ffi.new("zn_aio_fault *", wrong)
    assert engine.lib.zn_aio_inject(engine.handle, plan) == -errno.EINVAL
    assert engine.lib.zn_aio_inject(engine.handle, engine.ffi.NULL) == 0


def test_opening_and_closing_leaves_no_descriptor_and_no_thread(start_engine: Callable[..., Engine]) -> None:
    def held() -> set[str]:
        return {f"{kind} {name}" for kind in ("fd", "task") for name in os.listdir(f"/proc/self/{kind}")}

    before = held()  # kernel helpers of earlier tests may be among them, and end meanwhile
    for _ in range(20):
        assert start_engine().close() == 0
    assert held() <= before


# ---- all at once -------------------------------------------------------------------------------


def test_hundreds_of_mixed_requests_from_two_threads_each_complete_exactly_once(
    start_engine: Callable[..., Engine], file: int
) -> None:
    slots, slot_bytes = 400, 3 * CHUNK + 100
    before = noise(slots * slot_bytes)
    os.pwrite(file, before.tobytes(), 0)
    engine = start_engine(queue_depth=16)
    engine.inject(
        **{"seed": 7, "status": -errno.EIO, "fail_rate": ALWAYS // 50, "short_rate": ALWAYS // 5},
        **{"delay_rate": ALWAYS // 10, "delay_us": 500},
    )
    dice = random.Random(3)
    requests = []
    for slot in range(slots):
        begin = slot * slot_bytes
        op, nbytes = dice.choice((READ, WRITE)), dice.randint(0, slot_bytes)
        buffer = noise(nbytes, 1000 + slot) if op == WRITE else np.zeros(nbytes, np.uint8)
        requests.append((slot, op, file, begin, buffer))

    def submit(mine: list[Any]) -> None:
        for i in range(0, len(mine), 8):
            assert engine.submit(*mine[i : i + 8]) == 0

    threads = [threading.Thread(target=submit, args=(requests[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = engine.drain()
    after = contents(file)
    assert set(done) == set(range(slots))
    assert any(status == -errno.EIO for status, _, _ in done.values())
    for slot, _, _, begin, buffer in requests:
        status, nbytes, fail_offset = done[slot]
        end = begin + buffer.nbytes
        if status == 0:
            assert (nbytes, fail_offset) == (buffer.nbytes, -1)
            assert np.array_equal(after[begin:end], buffer)
        else:
            assert status == -errno.EIO and nbytes < buffer.nbytes and begin <= fail_offset < end
        assert np.array_equal(after[end : begin + slot_bytes], before[end : begin + slot_bytes])
