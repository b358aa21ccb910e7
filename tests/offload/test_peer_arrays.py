"""What one process writes through its planes another reads through its own, on every backend and tier."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers import Parent, all_run, running
from shared_names import left_behind, shared_names

from offload.array.tiered_array import Disk, Home, TieredArray
from offload.errors import ConfigError, StateError
from offload.io import swapfile
from offload.io.aio import AioOptions, open_aio
from offload.io.aio_base import BACKENDS
from offload.io.stripes import StripeMap
from offload.io.swapfile import PeerSwap, SwapGeometry, SwapSpace, free_bytes
from offload.memory.board import NodeBoard
from offload.memory.host_memory import map_host, tensor_over
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.system.descriptors import AllGatherBytes, exchange_descriptors

PAGE = 4096
SECONDS = 30.0
NUMEL, WIDTH = 37 * PAGE, 2
IN_MEMORY = (11 * PAGE, 20 * PAGE)
"""The middle of the plane lies in memory, the two ends on the disk."""


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / f"drive{index}" for index in range(count)]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


def values(peer: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * peer + epoch)
    return torch.randint(0, 256, (NUMEL * WIDTH,), dtype=torch.uint8, generator=generator)


def buffer() -> torch.Tensor:
    return tensor_over(map_host(NUMEL * WIDTH))[: NUMEL * WIDTH]


def plane_over(disk: Disk, region: SharedHostMemory) -> TieredArray:
    """Alike on both sides: over one's own memory and swap space, or over the other's."""
    low, high = IN_MEMORY
    homes = [
        Home(0, low, None, 3 * PAGE),
        Home(low, high, region.data[PAGE : PAGE + (high - low) * WIDTH]),
        Home(high, NUMEL, None, 3 * PAGE + low * WIDTH),
    ]
    return TieredArray("weights", WIDTH, homes, disk)


def region_bytes() -> int:
    return (IN_MEMORY[1] - IN_MEMORY[0]) * WIDTH + PAGE


class Side:
    """A process with a plane of its own, and the other's."""

    def __init__(self, index: int, share: AllGatherBytes, path: Path, backend: str) -> None:
        self.index, self.share = index, share
        self.aio = open_aio(AioOptions(backend=backend, chunk_bytes=2 * PAGE))
        self.region = SharedHostMemory(region_bytes(), "weights", prefault=False)
        swap = SwapSpace(folders(path, 2), 100 * PAGE)
        self.plane = plane_over(Disk(self.aio, swap), self.region)
        self.swap, other = swap, 1 - index
        self.board = NodeBoard.join(index, 2, 2, share)
        self.regions = map_peer_memory(index, 2, share, self.region)
        received = exchange_descriptors(index, 2, share, swap.descriptors)
        geometry = json.loads(share(json.dumps(asdict(swap.geometry)).encode())[other])
        self.theirs = PeerSwap(received[other], SwapGeometry(**{k: tupled(v) for k, v in geometry.items()}))
        self.other = plane_over(Disk(self.aio, self.theirs), self.regions[other])

    def close(self) -> None:
        self.board.close()
        for region in self.regions:
            region.close()
        self.plane.close()
        self.other.close()
        self.aio.close()
        self.swap.close()
        self.theirs.close()


def tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "auto"])
def test_each_of_two_processes_reads_what_the_other_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    try:
        open_aio(AioOptions(backend=backend)).close()
    except ConfigError as error:
        pytest.skip(str(error))
    # Neither the homes nor what is read is whole stripes; a round is three of them.
    monkeypatch.setattr(swapfile, "stripe_weights", lambda folders: [1.0, 2.0])
    monkeypatch.setattr(
        swapfile,
        "StripeMap",
        type("Small", (StripeMap,), {"__init__": lambda s, w: StripeMap.__init__(s, w, 3 * PAGE)}),
    )
    ranges = [(0, NUMEL), (5 * PAGE, 30 * PAGE), (0, 2 * PAGE), (12 * PAGE, 13 * PAGE), (36 * PAGE, NUMEL)]

    def job(index: int, share: AllGatherBytes, parent: Parent) -> int:
        before = len(os.listdir("/proc/self/fd"))
        side = Side(index, share, tmp_path, backend)
        source, into, compared = buffer(), buffer(), 0

        async def play() -> int:
            nonlocal compared
            for epoch in range(1, 5):
                source.copy_(values(index, epoch))
                await side.plane.write(0, NUMEL, source)
                side.board.publish(0, epoch)
                await side.board.wait_for_peer(1 - index, 0, epoch, what="the write", deadline_seconds=SECONDS)
                expected = values(1 - index, epoch)
                for begin, end in ranges:
                    part = into[: (end - begin) * WIDTH]
                    await side.other.read(begin, end, part)
                    assert torch.equal(part, expected[begin * WIDTH : end * WIDTH])
                    compared += part.numel()
                memory = side.other.memory(*IN_MEMORY)
                assert memory is not None and torch.equal(memory, expected[IN_MEMORY[0] * WIDTH : IN_MEMORY[1] * WIDTH])
                side.board.publish(1, epoch)
                await side.board.wait_for_all(1, epoch, what="the read", deadline_seconds=SECONDS)
            with pytest.raises(StateError, match="can only read the swap space of another process"):
                await side.other.write(0, PAGE, source[: PAGE * WIDTH])
            return compared

        compared = asyncio.run(play())
        assert list(tmp_path.glob("drive*/*")) == []  # nothing has a name
        share(b"")
        side.close()
        assert len(os.listdir("/proc/self/fd")) == before
        return compared

    assert all_run(2, job) == [4 * sum(end - begin for begin, end in ranges) * WIDTH] * 2


def test_a_swap_space_that_grows_is_read_in_its_new_parts_too(tmp_path: Path) -> None:
    aio = open_aio(AioOptions())
    space = SwapSpace([tmp_path], 2 * PAGE)
    peer = PeerSwap([os.dup(fd) for fd in space.descriptors], space.geometry)
    offset = space.extend(3 * PAGE)
    source, into = buffer()[: 3 * PAGE], buffer()[: 3 * PAGE]
    source.copy_(values(0, 0)[: 3 * PAGE])

    async def play() -> None:
        await Disk(aio, space).write(offset, source)
        await Disk(aio, peer).read(offset, into)

    asyncio.run(play())
    assert torch.equal(source, into)
    with pytest.raises(StateError, match=r"reserving 4,096 bytes: this swap space belongs to another process"):
        peer.extend(PAGE)
    with pytest.raises(OSError):
        os.pwrite(peer.descriptors[0], bytes(PAGE), 0)  # the kernel would refuse it too
    aio.close()
    for each in (space, peer):
        each.close()


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), offset=st.integers(0, 99), pages=st.integers(0, 99))
def test_counts_and_stripe_bytes_are_all_of_a_stripe_map(counts: list[int], offset: int, pages: int) -> None:
    told = StripeMap.of_counts(StripeMap(counts, PAGE).counts, PAGE)
    original = StripeMap(counts, PAGE)
    assert list(told.pieces(offset * PAGE, pages * PAGE)) == list(original.pieces(offset * PAGE, pages * PAGE))
    assert StripeMap.of_counts(counts, PAGE).counts == tuple(counts)


def test_a_swap_space_with_files_missing_is_refused(tmp_path: Path) -> None:
    space = SwapSpace(folders(tmp_path, 2), PAGE)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StateError, match=r"expected descriptors of 2 files \(.*drive0, .*drive1\), got 1"):
        PeerSwap([os.dup(space.descriptors[0])], space.geometry)
    assert len(os.listdir("/proc/self/fd")) == files
    space.close()


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB that nobody else writes to."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("killed", [0, 1])
def test_whichever_process_is_killed_first_not_a_byte_is_left(small_fs: Path, killed: int) -> None:
    before, names = free_bytes(small_fs), shared_names()

    def job(index: int, share: AllGatherBytes, parent: Parent) -> None:
        side = Side(index, share, small_fs, "auto")
        parent.tell("open")
        parent.receive()
        side.theirs.close()
        parent.tell("closed")
        parent.receive()

    with running([job, job]) as peers:
        for peer in peers:
            peer.receive()
        both = before - free_bytes(small_fs)
        assert both >= 2 * 100 * PAGE
        peers[killed].kill()
        survivor = peers[1 - killed]
        assert before - free_bytes(small_fs) == both  # it is read to the end
        survivor.send("close")
        assert survivor.receive() == "closed"
        assert before - free_bytes(small_fs) == both // 2
        survivor.kill()
    left = [path for path in small_fs.rglob("*") if path.is_file()]
    assert left == [] and left_behind(names) == set()
    for folder in small_fs.iterdir():
        folder.rmdir()
    assert free_bytes(small_fs) == before
