"""The engine's memory is registered where the kernel offers it; without, everything still moves."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.array.tiered_array import Disk
from offload.errors import ConfigError
from offload.io.aio import Aio, AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.pool import BlockPool
from offload.sizes import PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def uring() -> Aio:
    try:
        aio = open_aio(AioOptions(backend="io_uring", chunk_bytes=PAGE_BYTES, queue_depth=4))
    except ConfigError as error:
        pytest.skip(str(error))
    probe = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    undo = aio.register_memory(probe)
    if "not registered" in aio.reason or not getattr(aio, "_registered", None):
        aio.close()
        pytest.skip(f"no registered buffers here: {aio.reason}")
    undo()
    return aio


def arena_of(register: Callable[[torch.Tensor], Callable[[], None]]) -> BlockPool:
    return BlockPool("host", 4 * MIB, "memory_budget.host", torch.device("cpu"), register=register)


def test_blocks_of_a_registered_arena_move_through_it_and_a_closed_arena_is_forgotten(tmp_path: Path) -> None:
    disk = Disk(uring(), SwapSpace([tmp_path], 4 * MIB))
    arena = arena_of(disk.aio.register_memory)
    block = arena.allocate(8 * PAGE_BYTES, "record")
    block.data.copy_(torch.randint(0, 256, (8 * PAGE_BYTES,), dtype=torch.uint8))
    kept = block.data.clone()

    async def there_and_back() -> None:
        await disk.write(0, block.data)
        block.data.zero_()
        await disk.read(0, block.data)

    asyncio.run(there_and_back())
    assert torch.equal(block.data, kept)
    assert disk.aio.stats().registered == 16
    arena.close()
    asyncio.run(there_and_back())  # somebody kept the tensor: it moves the plain way
    assert torch.equal(block.data, kept)
    assert disk.aio.stats().registered == 16
    disk.close()


def test_registered_memory_lives_until_it_is_unregistered_or_the_engine_is_closed() -> None:
    """Another mapping at the same address would be taken for it."""
    aio = uring()
    for ends in (lambda undo: undo(), lambda undo: aio.close()):
        memory = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
        alive = weakref.ref(memory)
        undo = aio.register_memory(memory)
        del memory
        gc.collect()
        assert alive() is not None
        ends(undo)
        gc.collect()
        assert alive() is None
    undo()  # after the engine: nothing left to do


def test_past_the_limit_of_locked_memory_everything_moves_and_the_reason_says_why(tmp_path: Path) -> None:
    """Without privileges a few locked pages are all there are: a child of this process gives its own up."""
    program = f"""
import asyncio, os, resource
import torch
from offload.io.aio import AioOptions, open_aio
from offload.memory.pool import BlockPool
from offload.errors import ConfigError
from offload.array.tiered_array import Disk
from offload.io.swapfile import SwapSpace
open_aio(AioOptions()).close()  # everything is imported while this user may still read it
swap = SwapSpace([{str(tmp_path)!r}], 1 << 20)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    disk = Disk(open_aio(AioOptions(backend="io_uring", queue_depth=4)), swap)
except ConfigError as error:
    print("skip:", error)
    raise SystemExit
arena = BlockPool("host", 1 << 20, "memory_budget.host", torch.device("cpu"), register=disk.aio.register_memory)
data = arena.allocate(1 << 19, "record").data
data.fill_(7)
async def there_and_back():
    await disk.write(0, data)
    data.zero_()
    await disk.read(0, data)
asyncio.run(there_and_back())
print(disk.aio.stats().registered, bool((data == 7).all()), disk.aio.reason)
arena.close()
disk.close()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip") or done.stdout.startswith("0 True io_uring: chosen by the configuration\n"):
        pytest.skip(f"no registered buffers here: {done.stdout}")
    for part in ("0 True io_uring", "buffers are not registered", errno.errorcode[errno.ENOMEM], "RLIMIT_MEMLOCK"):
        assert part in done.stdout


def test_a_child_of_fork_finds_zeros_in_a_registered_arena_and_the_parent_keeps_its_bytes() -> None:
    registered: list[torch.Tensor] = []

    def register(memory: torch.Tensor) -> Callable[[], None]:
        registered.append(memory)
        return registered.clear

    arena = arena_of(register)
    data = arena.allocate(PAGE_BYTES, "record").data
    data.fill_(5)
    assert [memory.numel() for memory in registered] == [4 * MIB]
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(memoryview(data.numpy())) == bytes(PAGE_BYTES) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((data == 5).all())
    arena.close()
    assert registered == []
