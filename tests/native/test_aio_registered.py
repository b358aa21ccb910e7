"""Registered memory changes how bytes move, never which bytes."""

from __future__ import annotations

import errno
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import native

READ, WRITE = 0, 1
CHUNK = 4096
POOL = 16 * CHUNK
SECOND_NS = 10**9
ROOT = Path(__file__).resolve().parents[2]


class Ring:
    """An io_uring engine with chunks of a page."""

    def __init__(self, zn: Any, backend: int = 0) -> None:
        self.ffi, self.lib = zn.ffi, zn.lib
        out = self.ffi.new("zn_aio **")
        options = {"backend": backend, "queue_depth": 4, "threads": 1, "requests_max": 64, "chunk_bytes": CHUNK}
        assert self.lib.zn_aio_open(out, self.ffi.new("zn_aio_options *", options)) == 0
        self.handle = out[0]

    def address(self, buffer: np.ndarray) -> Any:
        return self.ffi.cast("void *", buffer.ctypes.data)

    def register(self, buffer: np.ndarray) -> int:
        return int(self.lib.zn_aio_register_memory(self.handle, self.address(buffer), buffer.nbytes))

    def unregister(self, buffer: np.ndarray) -> int:
        return int(self.lib.zn_aio_unregister_memory(self.handle, self.address(buffer), buffer.nbytes))

    def move(self, op: int, fd: int, offset: int, buffer: np.ndarray) -> int:
        request = {"op": op, "fd": fd, "offset": offset, "nbytes": buffer.nbytes, "buffer": self.address(buffer)}
        assert self.lib.zn_aio_submit(self.handle, self.ffi.new("zn_aio_request *", request), 1) == 0
        done = self.ffi.new("zn_aio_completion *")
        poller = select.poll()
        poller.register(self.lib.zn_aio_event_fd(self.handle), select.POLLIN)
        assert poller.poll(20_000), "the engine hangs"
        assert self.lib.zn_aio_poll(self.handle, done, 1) == 1
        return int(done.status)

    def registered(self) -> int:
        """Transfers through registered memory so far."""
        out = self.ffi.new("zn_aio_stats *")
        assert self.lib.zn_aio_stats_get(self.handle, out) == 0
        return int(out.registered)


@pytest.fixture(scope="module")
def zn() -> Any:
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(f"no native library: {error.reason}")


@pytest.fixture
def ring(zn: Any) -> Iterator[Ring]:
    if zn.lib.zn_aio_probe(0) != 0:
        pytest.skip("no io_uring here")
    engine = Ring(zn)
    page = np.zeros(CHUNK, np.uint8)
    if (status := engine.register(page)) != 0:
        engine.lib.zn_aio_close(engine.handle)
        pytest.skip(f"this kernel registers no buffers: {errno.errorcode[-status]}")
    assert engine.unregister(page) == 0
    yield engine
    assert engine.lib.zn_aio_close(engine.handle) == 0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


FAULTS = {
    "no fault": {},
    "short": {"short_rate": 1 << 15},
    "EINTR": {"status": -errno.EINTR, "fail_rate": 1 << 14},
}


@pytest.mark.parametrize("fault", FAULTS)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    begin=st.integers(0, POOL - 1),
    length=st.integers(0, POOL),
    known_begin=st.integers(0, POOL - 1),
    known_length=st.integers(1, POOL),
)
def test_bytes_move_alike_inside_outside_and_across_the_ends_of_what_is_registered(
    ring: Ring, file: int, fault: str, begin: int, length: int, known_begin: int, known_length: int
) -> None:
    os.ftruncate(file, 0)
    pool = noise(POOL, begin)
    before = pool.copy()
    known = pool[known_begin : known_begin + known_length]
    source = pool[begin : begin + length]
    assert ring.register(known) == 0
    ring.lib.zn_aio_inject(ring.handle, ring.ffi.new("zn_aio_fault *", {"op_mask": 3, **FAULTS[fault]}))
    assert ring.move(WRITE, file, begin, source) == 0
    assert os.pread(file, POOL, begin) == before[begin : begin + length].tobytes()
    source[:] = 0
    assert ring.move(READ, file, begin, source) == 0
    assert np.array_equal(pool, before)
    assert ring.unregister(known) == 0


def test_a_chunk_is_fixed_exactly_when_it_lies_inside_what_is_registered(ring: Ring, file: int) -> None:
    pool = noise(8 * CHUNK)
    assert ring.register(pool[2 * CHUNK : 6 * CHUNK]) == 0
    assert ring.move(WRITE, file, 0, pool) == 0
    assert ring.registered() == 4
    assert ring.move(WRITE, file, 0, pool[CHUNK + 1 : 3 * CHUNK + 1]) == 0  # its second chunk is inside
    assert ring.registered() == 5
    assert ring.unregister(pool[2 * CHUNK : 6 * CHUNK]) == 0
    assert ring.move(READ, file, 0, pool) == 0
    assert ring.registered() == 5


def test_unregistering_forgets_the_ranges_inside_and_keeps_the_others(ring: Ring, file: int) -> None:
    pool = noise(8 * CHUNK)
    for first in (0, 2, 4):
        assert ring.register(pool[first * CHUNK : (first + 2) * CHUNK]) == 0
    assert ring.unregister(pool[CHUNK : 8 * CHUNK]) == 0
    assert ring.move(WRITE, file, 0, pool) == 0
    assert ring.registered() == 2
    assert ring.unregister(pool) == 0


@pytest.mark.slow
def test_a_range_past_one_gibibyte_is_cut_and_still_moves_whole(ring: Ring, file: int) -> None:
    gibibyte = 1 << 30
    mapped = mmap.mmap(-1, gibibyte + 2 * CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)  # registering faults the whole gibibyte in
    big = np.frombuffer(mapped, np.uint8)
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 3 * gibibyte:
        pytest.skip("needs 3 GiB of free memory")
    assert ring.register(big) == 0
    across = big[gibibyte - CHUNK - 7 : gibibyte + 2 * CHUNK - 7]
    across[:] = noise(across.nbytes)
    assert ring.move(WRITE, file, 0, across) == 0
    assert os.pread(file, across.nbytes, 0) == across.tobytes()
    assert ring.registered() == 2  # the chunk in the middle lies in neither entry
    assert ring.unregister(big) == 0


def test_memory_that_cannot_be_registered_leaves_the_table_as_it_was(ring: Ring, file: int) -> None:
    mapped = mmap.mmap(-1, 4 * CHUNK, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapped, np.uint8)
    pool = noise(CHUNK)
    assert ring.register(pool) == 0
    nowhere = ring.ffi.cast("void *", 1 << 12)
    assert ring.lib.zn_aio_register_memory(ring.handle, nowhere, CHUNK) == -errno.EFAULT
    for wrong in ((ring.ffi.NULL, CHUNK), (ring.address(address), 0)):
        assert ring.lib.zn_aio_register_memory(ring.handle, *wrong) == -errno.EINVAL
    assert ring.move(WRITE, file, 0, pool) == 0
    assert ring.registered() == 1
    assert ring.unregister(pool) == 0


@pytest.mark.parametrize("backend", [1, 2])
def test_backends_without_registering_say_so_and_move_the_same_bytes(zn: Any, file: int, backend: int) -> None:
    if zn.lib.zn_aio_probe(backend) != 0:
        pytest.skip("this backend does not work here")
    engine = Ring(zn, backend)
    pool = noise(3 * CHUNK)
    assert engine.register(pool) == -errno.ENOTSUP
    assert engine.move(WRITE, file, 0, pool) == 0
    assert os.pread(file, POOL, 0) == pool.tobytes()
    assert engine.registered() == 0
    assert engine.lib.zn_aio_close(engine.handle) == 0


def test_closing_the_engine_gives_the_pages_back_at_once(zn: Any) -> None:
    """What is still pinned when it is unmapped would stay resident; the kernel counts it as VmPin."""
    if zn.lib.zn_aio_probe(0) != 0:
        pytest.skip("no io_uring here")
    program = """
import mmap, sys
import numpy as np
import native
zn = native.load()
def locked():
    lines = open("/proc/self/status").read().splitlines()
    return [line for line in lines if line.startswith(("VmPin", "VmLck"))]
before = locked()
out = zn.ffi.new("zn_aio **")
options = {"backend": 0, "queue_depth": 4, "threads": 1, "requests_max": 4, "chunk_bytes": 4096}
assert zn.lib.zn_aio_open(out, zn.ffi.new("zn_aio_options *", options)) == 0
memory = np.zeros(32 << 20, np.uint8)
status = zn.lib.zn_aio_register_memory(out[0], zn.ffi.cast("void *", memory.ctypes.data), memory.nbytes)
during = locked()
assert zn.lib.zn_aio_close(out[0]) == 0
print(status, during != before, locked() == before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["0", "True", "True"], ["-95", "False", "True"])
