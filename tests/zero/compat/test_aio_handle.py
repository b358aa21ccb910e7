"""DeepSpeed's handle of asynchronous I/O on this library's engine: what was written comes back, errors are raised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aliased import code, said
from probe import collected_by, mover_of_handle

from offload.errors import ConfigError, StorageError
from offload.io.io_loop import IoFuture
from offload.memory.host_memory import map_host, tensor_over
from zero.compat.operators import BUILDERS

SIZES = [1, 511, 4096, 4097, 3 * 4096, (1 << 20) + 4096, (2 << 20) + 3]


@pytest.fixture(params=[(1 << 20, 128, False, False, 1), (5000, 2, True, True, 3)], ids=["defaults", "odd"])
def handle(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield BUILDERS["AsyncIOBuilder"]().load().aio_handle(*request.param)


def random_bytes(nbytes: int, *, aligned: bool = True, shift: int = 0) -> torch.Tensor:
    """Bytes in memory that starts on a page, or `shift` behind one."""
    memory = tensor_over(map_host(nbytes + shift))[shift : shift + nbytes]
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("nbytes", SIZES)
def test_the_file_holds_the_bytes_and_they_come_back(handle: Any, nvme_path: Path, nbytes: int, shift: int) -> None:
    path, data = nvme_path / "file", random_bytes(nbytes, shift=shift)
    assert handle.sync_pwrite(data, str(path)) == 1
    assert path.read_bytes() == data.numpy().tobytes()
    back = torch.zeros(nbytes, dtype=torch.uint8)
    assert handle.sync_pread(back, str(path)) == 1
    assert torch.equal(back, data)
    aligned = torch.zeros_like(random_bytes(nbytes))
    assert handle.read(aligned, str(path), True) == 0
    assert torch.equal(aligned, data)


@pytest.mark.parametrize("offset", [0, 4096, 5])
def test_a_part_of_a_file_is_read_and_written_and_the_rest_stays(handle: Any, nvme_path: Path, offset: int) -> None:
    path, before, part = nvme_path / "file", random_bytes(20000), random_bytes(8195)
    path.write_bytes(before.numpy().tobytes())
    assert handle.write(part, str(path), True, offset) == 0
    expected = before.clone()
    expected[offset : offset + 8195] = part
    assert path.read_bytes() == expected.numpy().tobytes()
    back = torch.zeros_like(part)
    assert handle.pread(back, str(path), True, False, offset) == 1
    assert torch.equal(back, part)


def test_several_run_at_once_until_they_are_waited_for(handle: Any, nvme_path: Path) -> None:
    tensors = [
        torch.randn(shape).to(dtype) for shape in ((3, 5), (1000, 7), ()) for dtype in (torch.float32, torch.half)
    ]
    for index, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, str(nvme_path / str(index))) == 0
    assert handle.wait() == len(tensors) and handle.wait() == 0
    back = [torch.zeros_like(tensor) for tensor in tensors]
    for index, tensor in enumerate(back):
        assert handle.async_pread(tensor, str(nvme_path / str(index)), 0) == 0
    assert handle.wait() == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))


def test_a_descriptor_is_written_to_and_stays_open(handle: Any, nvme_path: Path) -> None:
    data = random_bytes(10000)
    with open(nvme_path / "file", "wb") as file:
        assert handle.async_pwrite(data, file.fileno(), 4096) == 0 and handle.wait() == 1
        os.fstat(file.fileno())
    assert (nvme_path / "file").read_bytes() == bytes(4096) + data.numpy().tobytes()


def test_a_descriptor_has_a_name_of_its_own_as_in_deepspeed(handle: Any, nvme_path: Path) -> None:
    data, path = random_bytes(10000), nvme_path / "file"
    with path.open("wb") as file:
        assert handle.async_pwrite(data, fd=file.fileno(), file_offset=5) == 0 and handle.wait() == 1
        assert handle.async_pwrite(buffer=data, filename=str(path), file_offset=20000) == 0 and handle.wait() == 1
        for where in ({}, {"filename": str(path), "fd": file.fileno()}):
            with pytest.raises(ConfigError, match="expected a filename or a descriptor"):
                handle.async_pwrite(data, **where)
    assert path.read_bytes() == bytes(5) + data.numpy().tobytes() + bytes(9995) + data.numpy().tobytes()


def test_memory_of_its_own_is_pinned_until_it_is_freed(handle: Any) -> None:
    made = handle.new_cpu_locked_tensor(5000, torch.empty(0))
    assert handle.is_pinned(made) and handle.is_pinned(made[100:])
    assert not handle.is_pinned(torch.zeros(8))
    assert handle.free_cpu_locked_tensor(made) and not handle.is_pinned(made)


def test_what_it_was_made_with_is_told(handle: Any) -> None:
    told = (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit())
    more = (handle.get_overlap_events(), handle.get_intra_op_parallelism())
    assert (*told, *more) in [(1 << 20, 128, False, False, 1), (5000, 2, True, True, 3)]
    assert handle.get_alignment() == 4096


def test_locked_memory_is_aligned_and_freed_once(handle: Any, nvme_path: Path) -> None:
    made = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16 and made.shape == (5000,) and made.data_ptr() % handle.get_alignment() == 0
    made.normal_()
    handle.sync_pwrite(made, str(nvme_path / "file"))
    back = torch.empty_like(made)
    handle.sync_pread(back, str(nvme_path / "file"))
    assert torch.equal(back, made)
    assert handle.free_cpu_locked_tensor(made) and not handle.free_cpu_locked_tensor(made)
    assert not handle.free_cpu_locked_tensor(back)


def test_what_fails_raises_and_names_the_file_and_the_next_call_works(handle: Any, nvme_path: Path) -> None:
    missing, short = str(nvme_path / "none" / "file"), nvme_path / "short"
    short.write_bytes(bytes(5000))
    for use in (handle.sync_pread, handle.sync_pwrite):
        with pytest.raises(StorageError, match=r"No such file or directory.*none/file"):
            use(torch.zeros(3), missing)
    with pytest.raises(StorageError, match=r"reached the end of the file.*short"):
        handle.sync_pread(random_bytes(8192), str(short))
    assert handle.async_pread(torch.zeros(3), missing) == 0
    assert handle.async_pwrite(torch.ones(3), str(short)) == 0
    with pytest.raises(OSError, match="none/file"):
        handle.wait()
    assert handle.wait() == 0
    back = torch.zeros(3)
    assert handle.sync_pread(back, str(short)) == 1 and back.tolist() == [1, 1, 1]


def test_a_tensor_with_gaps_and_a_number_out_of_range_are_refused(nvme_path: Path) -> None:
    made = BUILDERS["AsyncIOBuilder"]().load().aio_handle
    with pytest.raises(ConfigError, match=r"contiguous tensor.*call contiguous\(\)"):
        made().sync_pwrite(torch.zeros(4, 4).t(), str(nvme_path / "file"))
    with pytest.raises(ConfigError, match="queue_depth: expected 1 to 4096, got 0"):
        made(queue_depth=0)


def test_what_was_started_is_whole_when_the_process_ends(nvme_path: Path) -> None:
    text = f"""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder
    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
    handle.async_pwrite(torch.arange(3_000_001, dtype=torch.int32), {str(nvme_path / "file")!r})
    """
    said(*code(text))
    written = torch.frombuffer(bytearray((nvme_path / "file").read_bytes()), dtype=torch.int32)
    assert torch.equal(written, torch.arange(3_000_001, dtype=torch.int32))


def test_an_interrupted_wait_can_be_called_again(handle: Any, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what has failed."""
    path, data = nvme_path / "file", random_bytes(3 * 4096)
    handle.sync_pwrite(data, str(path))
    settle, left = IoFuture.wait, [1]

    def interrupted(transfer: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return settle(transfer)

    monkeypatch.setattr(IoFuture, "wait", interrupted)
    back = torch.zeros_like(data)
    handle.async_pread(back, str(path))
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.wait() == 1
    assert torch.equal(back, data)
    path.unlink()
    left[0] = 1
    with pytest.raises(KeyboardInterrupt):
        handle.sync_pread(torch.zeros(4096, dtype=torch.uint8), str(path))
    with pytest.raises(StorageError):
        handle.wait()


IN_A_CHILD = """
import os, signal, sys, torch
from zero.compat.operators import BUILDERS
handle = BUILDERS["AsyncIOBuilder"]().load().aio_handle(1 << 20, 8, False, False, 1)
data = torch.arange(4096, dtype=torch.uint8)
handle.sync_pwrite(data, sys.argv[1])
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
signal.alarm(60)
back = torch.zeros_like(data)
handle.sync_pread(back, sys.argv[1])
assert torch.equal(back, data)
print("went on")
"""


def test_a_forked_child_that_ends_leaves_its_parents_handle_alone(nvme_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_CHILD, str(nvme_path / "file")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "went on", done.stderr[-2000:]


def test_a_handle_that_is_collected_on_its_own_thread_ends_it() -> None:
    held = [BUILDERS["AsyncIOBuilder"]().load().aio_handle()]
    mover, files = mover_of_handle(held[0]), len(os.listdir("/proc/self/fd"))
    assert collected_by(mover, held)
    assert len(os.listdir("/proc/self/fd")) < files
