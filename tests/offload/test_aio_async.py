"""The asyncio face of the I/O engine: the same promises from every backend, errors that say where."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import re
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from offload.errors import ConfigError, StateError, StorageError
from offload.io import aio as offload_aio
from offload.io.aio import Aio, AioFault, AioOptions, open_aio

CHUNK = 4096
BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")
ABSORBED = {
    "no fault": None,
    "EINTR": AioFault(errno=errno.EINTR, fail_rate=0.3),
    "EAGAIN": AioFault(errno=errno.EAGAIN, fail_rate=0.3),
    "short": AioFault(short_rate=0.5),
    "delay": AioFault(delay_rate=0.3, delay_seconds=0.0003),
    "everything": AioFault(
        errno=errno.EINTR, fail_rate=0.2, short_rate=0.25, delay_rate=0.2, delay_seconds=0.0002, seed=5
    ),
}
HELD = AioFault(delay_rate=1.0, delay_seconds=math.inf)


def opened(backend: str, **options: Any) -> Aio:
    try:
        return open_aio(AioOptions(backend=backend, chunk_bytes=CHUNK, queue_depth=4, threads=2, **options))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=BACKENDS)
def aio(request: pytest.FixtureRequest) -> Iterator[Aio]:
    engine = opened(request.param)
    yield engine
    engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "swap", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def run(job: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(job, 30))


# ---- data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ABSORBED)
def test_what_was_written_is_read_back_whatever_the_sizes_and_the_absorbed_faults(
    aio: Aio, file: int, fault: str
) -> None:
    sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 17 * CHUNK + 3]
    offsets = [sum(sizes[:i]) + 10 * i for i in range(len(sizes))]
    data = [noise(nbytes, i) for i, nbytes in enumerate(sizes)]
    back = [torch.zeros_like(each) for each in data]

    async def job() -> None:
        aio.inject(ABSORBED[fault])
        await asyncio.gather(*(aio.write(file, at, each, "swap") for at, each in zip(offsets, data, strict=True)))
        await aio.sync(file, "swap")
        await asyncio.gather(*(aio.read(file, at, each, "swap") for at, each in zip(offsets, back, strict=True)))

    run(job())
    for at, each, again in zip(offsets, data, back, strict=True):
        assert torch.equal(each, again)
        assert os.pread(file, each.numel(), at) == bytes(each.numpy())
    assert aio.in_flight() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16, torch.float64])
def test_the_bytes_of_any_dtype_and_shape_are_moved(aio: Aio, file: int, dtype: torch.dtype) -> None:
    data = noise(24 * 512).view(dtype).reshape(2, 3, -1)[1]
    back = torch.zeros_like(data)

    async def job() -> None:
        await aio.write(file, 3, data, "swap")
        await aio.read(file, 3, back, "swap")

    run(job())
    assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize("fault", ABSORBED)
def test_direct_files_are_read_and_written(aio: Aio, tmp_path: Path, fault: str) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"{tmp_path} has no O_DIRECT: {error}")
    raw = noise(2 * 20 * CHUNK + CHUNK)
    begin = -raw.data_ptr() % CHUNK
    data, back = (raw[begin + i * 20 * CHUNK :][: 20 * CHUNK] for i in range(2))

    async def job() -> None:
        aio.inject(ABSORBED[fault])
        await aio.write(fd, CHUNK, data, "direct")
        await aio.read(fd, CHUNK, back, "direct")

    try:
        run(job())
    finally:
        os.close(fd)
    assert torch.equal(data, back)


def test_a_tensor_that_is_not_contiguous_is_refused(aio: Aio, file: int) -> None:
    with pytest.raises(TypeError, match="contiguous CPU tensor"):
        run(aio.write(file, 0, noise(64).reshape(8, 8).T, "swap"))


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("chunk", [0, 3, 9])
def test_an_error_names_errno_path_offset_and_free_space(aio: Aio, file: int, code: int, op: str, chunk: int) -> None:
    os.pwrite(file, bytes(40 * CHUNK), 0)
    aio.inject(AioFault(errno=code, fail_rate=1.0, skip=chunk, count_max=1, ops=(op,)))  # type: ignore[arg-type]
    neighbour, spared = noise(4 * CHUNK, 1), {"read": aio.write, "write": aio.read}[op]

    async def job() -> list[Any]:
        failing = (aio.read if op == "read" else aio.write)(file, 512, noise(10 * CHUNK), "/mnt/nvme/swap")
        return await asyncio.gather(failing, spared(file, 20 * CHUNK, neighbour, "other"), return_exceptions=True)

    error, fine = run(job())
    assert isinstance(error, StorageError) and fine is None
    assert (error.errno, error.path, error.offset) == (code, "/mnt/nvme/swap", 512 + chunk * CHUNK)
    status = os.fstatvfs(file)
    assert error.free_bytes is not None and 0 < error.free_bytes <= status.f_blocks * status.f_frsize
    for part in (op, "/mnt/nvme/swap", errno.errorcode[code], f"{error.offset:,}", f"{error.free_bytes:,}"):
        assert part in str(error)
    assert os.pread(file, 4 * CHUNK, 20 * CHUNK) == bytes(neighbour.numpy())
    run(aio.write(file, 512, noise(10 * CHUNK), "swap"))


def test_a_read_past_the_end_says_so(aio: Aio, file: int) -> None:
    os.pwrite(file, bytes(5000), 0)
    for fault in ABSORBED.values():
        aio.inject(fault)
        with pytest.raises(StorageError, match="reached the end of the file") as caught:
            run(aio.read(file, 0, noise(4 * CHUNK), "swap"))
        assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, 5000)


def test_errors_of_the_system_and_of_sync_are_storage_errors(aio: Aio, tmp_path: Path, file: int) -> None:
    fd = os.open(tmp_path / "swap", os.O_RDONLY)
    with pytest.raises(StorageError) as caught:
        run(aio.write(fd, CHUNK, noise(10), "swap"))
    assert (caught.value.errno, caught.value.offset) == (errno.EBADF, CHUNK)
    os.close(fd)
    aio.inject(AioFault(fail_rate=1.0, ops=("sync",)))
    with pytest.raises(StorageError, match="sync of /mnt/swap"):
        run(aio.sync(file, "/mnt/swap"))
    with pytest.raises(StorageError):
        run(aio.read(-1, 0, noise(10), "swap"))


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_fault_hits_the_bytes_that_it_names_and_no_others(aio: Aio, file: int, op: str) -> None:
    os.pwrite(file, bytes(12 * CHUNK), 0)
    aio.inject(AioFault(fail_rate=1.0, ops=(op,), begin=5 * CHUNK - 1, end=6 * CHUNK))  # type: ignore[arg-type]
    move, other = (aio.read, aio.write)[:: 1 if op == "read" else -1]
    for begin, nbytes in ((0, 4 * CHUNK), (6 * CHUNK, 6 * CHUNK)):
        run(move(file, begin, noise(nbytes), "swap"))
    for begin in (4, 5):
        run(other(file, begin * CHUNK, noise(CHUNK), "swap"))
        with pytest.raises(StorageError) as caught:
            run(move(file, begin * CHUNK, noise(CHUNK), "swap"))
        assert caught.value.offset == begin * CHUNK


def test_a_held_transfer_goes_on_when_the_plan_is_replaced(aio: Aio, file: int) -> None:
    async def job() -> None:
        aio.inject(HELD)
        tasks = [asyncio.create_task(aio.write(file, begin * CHUNK, noise(CHUNK), "swap")) for begin in range(3)]
        done, _ = await asyncio.wait(tasks, timeout=0.05)
        assert not done and len(aio.in_flight()) == 3
        aio.inject(replace(HELD, ops=("read",)))
        await asyncio.gather(*tasks)

    run(job())


def test_retries_end_and_report_the_errno(aio: Aio, file: int) -> None:
    aio.inject(AioFault(errno=errno.EINTR, fail_rate=1.0))
    with pytest.raises(StorageError) as caught:
        run(aio.write(file, 0, noise(10), "swap"))
    assert caught.value.errno == errno.EINTR
    assert 10 <= aio.stats().retried <= 1000


# ---- cancellation, the watchdog, closing -------------------------------------------------------


def test_a_cancelled_transfer_keeps_its_buffer_until_it_has_ended(aio: Aio, file: int) -> None:
    aio.inject(HELD)
    data = noise(CHUNK)
    expected, watched = bytes(data.numpy()), weakref.ref(data)

    async def job() -> None:
        nonlocal data
        task = asyncio.create_task(aio.write(file, 0, data, "swap"))
        del data
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
            assert not task.done() and watched() is not None and len(aio.in_flight()) == 1
        aio.inject(None)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert aio.in_flight() == []
        del task

    run(job())
    # A request that aiofiles has not begun to move is dropped; the native engine finishes what it accepted.
    assert os.pread(file, CHUNK, 0) == (b"" if aio.backend == "aiofiles" else expected)
    gc.collect()
    assert watched() is None


def test_what_is_in_flight_can_be_listed(aio: Aio, file: int) -> None:
    aio.inject(HELD)

    async def job() -> list[str]:
        moves = [aio.write(file, 4096, noise(5000), "/mnt/swap"), aio.sync(file, "/mnt/swap")]
        tasks = [asyncio.create_task(move) for move in moves]
        await asyncio.sleep(0)
        lines = aio.in_flight()
        aio.inject(None)
        await asyncio.gather(*tasks)
        return lines

    write, sync = run(job())
    for part in ("write", "5,000 bytes", "offset 4,096", "/mnt/swap"):
        assert part in write
    assert "sync of /mnt/swap" in sync
    assert all(re.search(r", for \d+\.\d s$", line) for line in (write, sync))
    assert aio.in_flight() == []


def test_closing_with_transfers_in_flight_is_an_error_that_lists_them(aio: Aio, file: int) -> None:
    aio.inject(HELD)

    async def job() -> None:
        task = asyncio.create_task(aio.write(file, 0, noise(10), "/mnt/swap"))
        await asyncio.sleep(0)
        with pytest.raises(StateError, match="/mnt/swap"):
            aio.close()
        aio.inject(None)
        await task
        aio.close()
        aio.close()

    run(job())
    with pytest.raises(StateError, match="closed"):
        run(aio.read(file, 0, noise(10), "swap"))


def test_one_engine_serves_one_event_loop_after_the_other(aio: Aio, file: int) -> None:
    for seed in range(3):
        data, back = noise(100, seed), noise(100, 9)

        async def job(data: torch.Tensor = data, back: torch.Tensor = back) -> None:
            await aio.write(file, 0, data, "swap")
            await aio.read(file, 0, back, "swap")

        run(job())
        assert torch.equal(data, back)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_requests_than_the_table_holds_wait_their_turn(backend: str, file: int) -> None:
    aio = opened(backend, requests_max=3)

    async def job() -> None:
        await asyncio.gather(*(aio.write(file, i * 100, noise(100, i), "swap") for i in range(200)))

    run(job())
    assert os.pread(file, 20_000, 0) == b"".join(bytes(noise(100, i).numpy()) for i in range(200))
    aio.close()


def test_statistics_count_what_moved(aio: Aio, file: int) -> None:
    async def job() -> None:
        await aio.write(file, 0, noise(3 * CHUNK + 1), "swap")
        await aio.sync(file, "swap")
        await aio.read(file, 0, noise(CHUNK), "swap")

    run(job())
    stats = aio.stats()
    assert (stats.write_bytes, stats.read_bytes, stats.requests, stats.chunks) == (3 * CHUNK + 1, CHUNK, 3, 4 + 1 + 1)
    assert 0 < stats.read_seconds < stats.busy_seconds and 0 < stats.write_seconds < stats.busy_seconds
    aio.inject(AioFault(short_rate=1.0, count_max=5))
    run(aio.write(file, 0, noise(3 * CHUNK), "swap"))
    assert aio.stats().resumed == 5


# ---- the choice of a backend -------------------------------------------------------------------


class Blocked:
    """The native library, with some backends failing their probe."""

    def __init__(self, real: native.Native, statuses: dict[int, int]) -> None:
        self.ffi, self.lib, self._real, self._statuses = real.ffi, self, real.lib, statuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def zn_aio_probe(self, backend: int) -> int:
        return self._statuses.get(backend) or int(self._real.zn_aio_probe(backend))


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, int]], None]:
    try:
        real = native.load()
    except native.NativeUnavailable as error:
        pytest.skip(error.reason)

    def block(statuses: dict[int, int]) -> None:
        monkeypatch.setattr(native, "load", lambda: Blocked(real, statuses))

    return block


def test_auto_takes_the_best_that_works_and_says_what_was_wrong_with_the_others(
    block: Callable[[dict[int, int]], None],
) -> None:
    block({0: -errno.EPERM})
    without_uring = open_aio(AioOptions())
    assert without_uring.backend in ("libaio", "threads")
    for part in (f"{without_uring.backend}: ", "io_uring blocked", "EPERM", "kernel.io_uring_disabled"):
        assert part in without_uring.reason
    without_uring.close()
    block({0: -errno.ENOSYS, 1: -errno.EAGAIN})
    threads = open_aio(AioOptions())
    assert threads.backend == "threads" and "fs.aio-max-nr" in threads.reason
    threads.close()


def test_a_named_backend_that_does_not_work_is_an_error_that_says_why(block: Callable[[dict[int, int]], None]) -> None:
    block({0: -errno.EPERM, 1: -errno.ENOSYS})
    with pytest.raises(ConfigError, match=r"io_uring.*EPERM.*io_uring_disabled"):
        open_aio(AioOptions(backend="io_uring"))
    with pytest.raises(ConfigError, match=r"libaio.*ENOSYS"):
        open_aio(AioOptions(backend="libaio"))


def test_without_a_native_library_auto_falls_back_and_a_named_backend_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise native.NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "load", missing)
    fallback = open_aio(AioOptions())
    assert isinstance(fallback, offload_aio.AiofilesAio) and "no compiler" in fallback.reason
    fallback.close()
    with pytest.raises(ConfigError, match=r"threads.*no compiler"):
        open_aio(AioOptions(backend="threads"))


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        AioOptions(backend="uring", queue_depth=0, chunk_bytes=5000, threads=100, requests_max=-1)
    for name in ("backend", "queue_depth", "chunk_bytes", "threads", "requests_max"):
        assert name in str(caught.value)
