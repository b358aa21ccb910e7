"""Shared memory: exact, sealed, nameless, seen by all who map it, gone with them; descriptors reach every peer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import Parent, all_run, running
from shared_names import left_behind, shared_names

from offload.array.tiered_array import Disk
from offload.errors import BudgetError, ConfigError, PeerError, StateError
from offload.io.aio import AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.host_memory import fault_in
from offload.memory.pool import BlockPool, LinearPool
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.system import descriptors
from offload.system.descriptors import AllGatherBytes, close_received, exchange_descriptors, same_node

PAGE = 4096
CPU = torch.device("cpu")


@pytest.fixture(params=["1", "0"], ids=["native", "python"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ZERO_NATIVE", request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mapped_regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:zero-infinity")


def shared_bytes() -> int:
    """Of the whole machine, and so others' too."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) << 10


# ---- regions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, (2 << 20) + 5, 5 << 20])
def test_a_region_is_zeroed_exact_and_page_aligned_and_everything_returns(
    either_way: None, nbytes: int, touched: bool
) -> None:
    files, before = open_files(), mapped_regions()
    region = SharedHostMemory(nbytes, "test", prefault=touched)
    data = region.data
    assert data.dtype == torch.uint8 and data.numel() == region.nbytes == nbytes
    assert data.data_ptr() % PAGE == 0 or nbytes == 0
    assert not data.any()
    fault_in(data)
    data.fill_(7)
    region.close()
    region.close()
    assert bool((data == 7).all())  # the last tensor keeps the memory
    del data
    assert mapped_regions() == before and open_files() == files


def test_touched_pages_are_resident_at_once_and_others_when_they_are_touched(either_way: None) -> None:
    nbytes = 64 * PAGE
    region = SharedHostMemory(nbytes, "test", prefault=False)
    assert os.fstat(region.descriptor).st_blocks == 0
    region.data[PAGE * 3] = 5
    fault_in(region.data[PAGE * 2 : PAGE * 10])
    assert os.fstat(region.descriptor).st_blocks * 512 == 8 * PAGE
    assert region.data[PAGE * 3] == 5
    other = SharedHostMemory(nbytes, "test")
    assert os.fstat(other.descriptor).st_blocks * 512 == nbytes
    for each in (region, other):
        each.close()


def test_two_mappings_see_each_other_and_nobody_can_shorten_them(either_way: None) -> None:
    nbytes = 3 * PAGE + 17
    first = SharedHostMemory(nbytes, "test")
    second = SharedHostMemory.open(os.dup(first.descriptor), nbytes, "test")
    first.data[:5] = torch.arange(5, dtype=torch.uint8)
    second.data[-3:] = 9
    assert second.data[:5].tolist() == [0, 1, 2, 3, 4] and first.data[-3:].tolist() == [9, 9, 9]
    for length in (PAGE, 100 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(second.descriptor, length)
    assert fcntl.fcntl(first.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    first.close()
    assert second.data[:5].tolist() == [0, 1, 2, 3, 4]
    second.close()


def test_what_is_no_region_of_that_length_is_refused_and_closed(tmp_path: Path) -> None:
    files = open_files()
    region = SharedHostMemory(2 * PAGE, "test")
    with pytest.raises(StateError, match=r"weights: expected shared memory of 12,288 bytes .* got 8,192 bytes"):
        SharedHostMemory.open(os.dup(region.descriptor), 3 * PAGE, "weights")
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(StateError, match=r"weights: descriptor .* is not shared memory"):
        SharedHostMemory.open(ordinary, 1, "weights")
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(StateError, match="length sealed, got 4,096 bytes with seals 0x0"):
        SharedHostMemory.open(unsealed, 1, "weights")
    region.close()
    assert open_files() == files


def test_a_closed_region_says_so() -> None:
    region = SharedHostMemory(PAGE, "weights of the node")
    region.close()
    for use in (lambda: region.data, lambda: region.descriptor):
        with pytest.raises(StateError, match="weights of the node: the shared memory is closed"):
            use()


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_AS"])
def test_a_region_that_the_kernel_refuses_is_a_budget_error_that_names_it(either_way: None, limit: str) -> None:
    files, which = open_files(), getattr(resource, limit)
    old = resource.getrlimit(which)
    used = {"RLIMIT_FSIZE": PAGE, "RLIMIT_NOFILE": 3, "RLIMIT_AS": 1 << 20}[limit]
    resource.setrlimit(which, (used, old[1]))
    try:
        with pytest.raises(BudgetError, match=r"gradients of the node: .* 1,073,741,824 bytes of memory: .*lower"):
            SharedHostMemory(1 << 30, "gradients of the node", prefault=False)
    finally:
        resource.setrlimit(which, old)
    assert open_files() == files


def test_an_offset_tells_another_mapping_where_a_tensor_lies() -> None:
    region = SharedHostMemory(1000, "test")
    view = region.data[100:200].view(torch.float32)
    assert region.offset_of(view) == 100
    assert region.offset_of(region.data) == 0
    for outside in (torch.zeros(4), region.data[::2], torch.zeros(2000, dtype=torch.uint8)):
        with pytest.raises(StateError, match="is not inside the shared memory of 1,000"):
            region.offset_of(outside)
    region.close()


# ---- arenas on a region ------------------------------------------------------------------------


def test_an_arena_on_a_region_tells_where_its_blocks_are() -> None:
    region = SharedHostMemory(10 * PAGE, "test")
    other = SharedHostMemory.open(os.dup(region.descriptor), 10 * PAGE, "test")
    arena = BlockPool("test", 8 * PAGE, "knob", CPU, shared=region)
    blocks = [arena.allocate(nbytes, "test") for nbytes in (100, PAGE, 3 * PAGE - 1)]
    for value, block in enumerate(blocks, 1):
        block.data.fill_(value)
    for value, block in enumerate(blocks, 1):
        offset = region.offset_of(block.data)
        assert bool((other.data[offset : offset + block.data.numel()] == value).all())
    blocks[0].free()
    arena.close()
    assert bool((region.data[PAGE : 2 * PAGE] == 2).all())  # the region is its owner's
    for each in (region, other):
        each.close()


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads", "aiofiles"])
def test_blocks_of_a_region_are_read_and_written_in_place_and_can_be_registered(tmp_path: Path, backend: str) -> None:
    try:
        aio = open_aio(AioOptions(backend=backend))
    except ConfigError as error:
        pytest.skip(str(error))
    region = SharedHostMemory(16 * PAGE, "test")
    arena = BlockPool("test", 16 * PAGE, "knob", CPU, shared=region, register=aio.register_memory)
    disk = Disk(aio, SwapSpace([tmp_path], 8 * PAGE))
    source, target = (arena.allocate(7 * PAGE, "test").data for _ in range(2))
    source.copy_(torch.arange(7 * PAGE) % 251)

    async def move() -> None:
        await disk.write(0, source)
        await disk.read(0, target)

    asyncio.run(move())
    assert torch.equal(source, target)
    arena.close()
    disk.close()
    region.close()


def test_an_arena_or_a_plane_that_is_larger_than_its_region_is_refused() -> None:
    region = SharedHostMemory(2 * PAGE, "test")
    with pytest.raises(BudgetError, match="the gradients pool: 12,288 bytes do not fit the shared memory of 8,192"):
        BlockPool("gradients", 3 * PAGE, "knob", CPU, shared=region)
    with pytest.raises(BudgetError, match=r"pool of 8,193 bytes: .* shared memory of 8,192"):
        LinearPool(2 * PAGE + 1, CPU, shared=region)
    region.close()


def test_planes_may_lie_in_a_region() -> None:
    region = SharedHostMemory(4 * PAGE, "test")
    memory = LinearPool(3 * PAGE, CPU, shared=region)
    pieces = [memory.allocate(PAGE), memory.allocate(2 * PAGE)]
    pieces[1].fill_(3)
    assert [region.offset_of(piece) for piece in pieces] == [0, PAGE]
    memory.close()
    assert bool((region.data[PAGE : 3 * PAGE] == 3).all())
    region.close()


# ---- descriptors -------------------------------------------------------------------------------


def memory_with(text: bytes) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, text)
    return descriptor


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_peer_gets_the_files_of_every_peer(count: int) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[list[bytes]]:
        before = open_files()
        # A number of files of its own, none on one peer, more than fit one message on another.
        own = [memory_with(f"{index}/{i}".encode()) for i in range(0 if index == 1 else 70 * index + 1)]
        received = exchange_descriptors(index, count, share, own)
        assert received[index] == own
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fds in received for fd in fds)
        found = [[os.pread(fd, 100, 0) for fd in fds] for fds in received]
        close_received(index, received)
        for fd in own:
            os.close(fd)
        assert open_files() == before
        return found

    sizes = [0 if peer == 1 else 70 * peer + 1 for peer in range(count)]
    expected = [[f"{peer}/{i}".encode() for i in range(size)] for peer, size in enumerate(sizes)]
    assert all_run(count, job) == [expected] * count


def raises(call: Any) -> tuple[str, tuple[int, ...]]:
    """Text and peers of the PeerError that `call` raises; nothing stays open."""
    before = open_files()
    try:
        call()
    except PeerError as error:
        assert open_files() == before
        return str(error), error.peers
    raise AssertionError("no PeerError")


def test_a_peer_that_never_comes_is_named_by_all_who_wait_for_it() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        if index == 1:
            share(b'{"pid": 77, "given": 0, "token": "00", "error": "", "name": "nobody"}')
            return "left", (1,)
        return raises(lambda: exchange_descriptors(index, 3, share, [0], seconds=0.3))

    before, left, after = all_run(3, job)
    assert left == ("left", (1,))
    assert "no connection from peer 1 (pid 77): nothing came within 0.3 s" in before[0] and 1 in before[1]
    assert "peer 1 (pid 77): it does not listen: it has ended, or is in another network namespace" in after[0]
    assert after[1] == (1,)


def test_a_peer_without_a_socket_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        if index == 1:

            def refuse() -> socket.socket:
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(descriptors, "_socket", refuse)
        return raises(lambda: exchange_descriptors(index, 3, share, [0]))

    for text, peers in all_run(3, job):
        assert "these peers could not make a socket: peer 1" in text and "Too many open files" in text and peers == (1,)


def test_strangers_are_sent_away_and_the_exchange_goes_on() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[bytes]:
        def listening(payload: bytes) -> list[bytes]:
            payloads = share(payload)
            if index == 1:
                name = descriptors.json.loads(payloads[0])["name"]
                for hello in (b"", b"short", bytes(descriptors.HELLO.size)):  # a wrong secret
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                        stranger.connect(b"\0" + name.encode())
                        if hello:
                            stranger.send(hello)
            return payloads

        received = exchange_descriptors(index, 2, listening, [memory_with(str(index).encode())])
        return [os.pread(fds[0], 10, 0) for fds in received]

    assert all_run(2, job) == [[b"0", b"1"]] * 2


def test_another_user_is_not_let_in() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")

    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        if index == 1:
            os.seteuid(1)
        return raises(lambda: exchange_descriptors(index, 2, share, [0], seconds=0.5))

    first, second = all_run(2, job)
    assert "1 unknown connections were refused" in first[0] and first[1] == (1,)
    assert second[1] == (0,)


def leave_room_for_ten_descriptors() -> None:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, highest + 20))
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
    for descriptor in opened[-10:]:
        os.close(descriptor)


def test_a_process_that_can_open_no_more_files_says_so() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        own = [memory_with(b"x") for _ in range(20)]
        if index == 1:
            leave_room_for_ten_descriptors()
        return raises(lambda: exchange_descriptors(index, 2, share, own, seconds=5))

    first, second = all_run(2, job)
    assert "cannot open more files; raise ulimit -n" in second[0] and second[1] == (0,)
    assert first[1] == (1,) and ("it stopped after 0 of 20 descriptors" in first[0] or "reset" in first[0])


def test_regions_of_all_peers_are_mapped_by_all() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[list[int]]:
        before = open_files()
        own = SharedHostMemory((index + 1) * PAGE, "gradients")
        regions = map_peer_memory(index, 3, share, own)
        assert regions[index] is own
        for peer, region in enumerate(regions):
            region.data[index] = 10 * index + peer
        share(b"")
        found = [region.data[:3].tolist() for region in regions]
        assert [region.nbytes for region in regions] == [PAGE, 2 * PAGE, 3 * PAGE]
        for region in regions:
            region.close()
        assert open_files() == before
        return found

    assert all_run(3, job) == [[[0, 10, 20], [1, 11, 21], [2, 12, 22]]] * 3


# ---- the same node -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_processes_of_one_machine_are_on_the_same_node(count: int) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> bool:
        before = open_files()
        answer = same_node(share)
        assert open_files() == before
        return answer

    assert all_run(count, job) == [True] * count


@pytest.mark.parametrize("lacks", ["another boot", "another namespace", "no way", "no files in memory"])
def test_peers_of_different_nodes_all_get_no(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    monkeypatch.setattr(descriptors, "SAME_NODE_SECONDS_MAX", 0.3)

    def job(index: int, share: AllGatherBytes, parent: Parent) -> bool:
        if index == 1 and lacks == "another boot":
            monkeypatch.setattr(descriptors, "node_identity", lambda: b"elsewhere")
        if index == 1 and lacks == "another namespace" and os.geteuid() == 0:
            subprocess_free_unshare()
        if index == 1 and lacks == "no way":  # a clone of a machine: alike in all, and yet apart
            monkeypatch.setattr(descriptors, "_socket", unreachable)
        if index == 1 and lacks == "no files in memory":
            monkeypatch.setattr(descriptors, "memory_file", no_files)
        return same_node(share)

    if lacks == "another namespace" and os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    assert all_run(3, job) == [False] * 3


def subprocess_free_unshare() -> None:
    """This process gets a network of its own."""
    import ctypes

    assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0, os.strerror(ctypes.get_errno())


def no_files() -> int:
    raise OSError(errno.ENOSYS, "no memfd_create")


class Elsewhere(socket.socket):
    """Binds and connects to names that nobody else knows."""

    def bind(self, address: Any) -> None:
        super().bind(address + b"/elsewhere")

    def connect(self, address: Any) -> None:
        super().connect(address + b"/elsewhere")


def unreachable() -> socket.socket:
    return Elsewhere(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# ---- nothing is left ---------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_processes_leave_no_shared_memory_whichever_goes_first(killed: int) -> None:
    nbytes = 256 << 20  # what others take or give back meanwhile is less than half of it

    def job(index: int, share: AllGatherBytes, parent: Parent) -> None:
        regions = map_peer_memory(index, 2, share, SharedHostMemory(nbytes, "test"))
        parent.tell(regions[1 - index].data[0].item())
        parent.receive()

    names = shared_names()
    before = shared_bytes()
    with running([job, job]) as peers:
        for peer in peers:
            peer.receive()
        assert shared_bytes() - before > 1.5 * nbytes
        assert left_behind(names) == set()
        peers[killed].kill()
        assert shared_bytes() - before > 1.5 * nbytes  # the other still maps both
        peers[1 - killed].kill()
        assert shared_bytes() - before < 0.5 * nbytes
    assert left_behind(names) == set()


def test_programs_that_are_started_do_not_keep_the_memory() -> None:
    region = SharedHostMemory(PAGE, "test")
    listed = subprocess.run(
        [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 50)"
         " if os.path.exists(f'/proc/self/fd/{fd}') or os.path.islink(f'/proc/self/fd/{fd}')])"],
        capture_output=True,
        text=True,
        check=True,
        close_fds=False,
    ).stdout  # fmt: skip
    assert "memfd:zero-infinity" not in listed
    with contextlib.suppress(StateError):
        region.close()
