"""Initial values that peers have in common: what the first stored is what all read, and nothing is written twice."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import Parent, all_run

from offload.errors import StateError, StorageError
from offload.io.init_file import InitFile
from offload.io.shared_init_file import SharedInitFile
from offload.system.descriptors import AllGatherBytes

MIB = 1 << 20
COUNT = 3


def opened(
    folder: Path | None, index: int, share: AllGatherBytes, count: int = COUNT, patience_seconds: float = 60.0
) -> Any:
    own = InitFile.in_memory() if folder is None else InitFile.on_disk([folder])
    return SharedInitFile.join(own, index, count, share, patience_seconds=patience_seconds)


def held_bytes(file: SharedInitFile) -> int:
    return 512 * os.fstat(file._file.descriptor).st_blocks


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


def values(seed: int, numel: int = MIB) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_every_peer_reads_what_the_first_has_stored_and_the_file_holds_it_once(folder: Path | None) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> tuple[list[bool], int]:
        before = descriptors()
        file = opened(folder, index, share)
        if index == 0:
            time.sleep(0.2)  # the others ask before anything is there
        offsets = [file.append(values(10 * index + at)) for at in range(3)]
        same = [torch.equal(file.read(offset, MIB, torch.float32), values(at)) for at, offset in enumerate(offsets)]
        share(b"")
        held = held_bytes(file)
        file.close()
        assert descriptors() <= before
        return same, held

    assert all_run(COUNT, job) == [([True] * 3, 12 * MIB)] * COUNT


def test_an_edit_of_all_peers_is_the_first_ones_and_a_look_is_no_edit(folder: Path | None) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[bool]:
        file = opened(folder, index, share)
        offset = file.append(values(index))
        looked = file.read(offset, MIB, torch.float32)
        if index != 1:
            file.write(offset, looked)  # one peer alone looks: nobody waits for it, nor it for anybody
            looked = file.read(offset, MIB, torch.float32)
        share(b"")
        if index == 0:
            time.sleep(0.2)
        file.write(offset, 2 * looked + index)
        same = [torch.equal(looked, values(0)), torch.equal(file.read(offset, MIB, torch.float32), 2 * values(0))]
        share(b"")
        file.close()
        return same

    assert all_run(COUNT, job) == [[True, True]] * COUNT


def test_a_peer_that_is_late_at_a_meeting_does_not_count_what_the_first_has_edited_since(folder: Path | None) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> bool:
        def late(told: bytes) -> list[bytes]:
            answers = share(told)
            time.sleep(0.3 * index)
            return answers

        file = opened(folder, index, late, count=2, patience_seconds=3.0)
        offset = file.append(values(index))
        file.sync_edits()
        file.write(offset, 2 * file.read(offset, MIB, torch.float32) + index)
        same = torch.equal(file.read(offset, MIB, torch.float32), 2 * values(0))
        share(b"")
        file.close()
        return same

    assert all_run(2, job) == [True, True]


def test_room_returns_when_every_peer_has_released_it(folder: Path | None) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[int]:
        file = opened(folder, index, share)
        offsets = [file.append(values(at)) for at in range(2)]
        file.end_edits()
        held = []
        for peer in range(COUNT):
            share(b"")
            if index == peer:
                file.free(offsets[0], 4 * MIB)
            share(b"")
            held.append(held_bytes(file) // MIB)
        assert torch.equal(file.read(offsets[1], MIB, torch.float32), values(1))
        share(b"")
        file.close()
        return held

    assert all_run(COUNT, job) == [[8, 8, 4]] * COUNT


def raises(call: Any) -> str:
    with pytest.raises(StateError) as caught:
        call()
    return str(caught.value)


def test_a_peer_that_builds_something_else_says_so(tmp_path: Path) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> tuple[str, bytes]:
        file = opened(tmp_path, index, share, count=2)
        offset = file.append(torch.zeros(4 + index))
        said = raises(lambda: file.read(offset, 4, torch.float32)) if index else ""
        return said, file.end_edits()

    (_, first), (said, second) = all_run(2, job)
    assert "parameter 0 differs from that of rank 0" in said and first != second


def test_an_edit_of_one_peer_alone_is_named_where_it_is_read_and_settling_drops_it(tmp_path: Path) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> tuple[str, list[float]]:
        file = opened(tmp_path, index, share, count=2, patience_seconds=0.3)
        offset = file.append(torch.ones(2))
        said = ""
        if index:
            file.write(offset, torch.zeros(2))
            said = raises(lambda: file.read(offset, 2, torch.float32))
        share(b"")
        file.end_edits()
        return said, file.read(offset, 2, torch.float32).tolist()

    (_, first), (said, second) = all_run(2, job)
    assert "has stored nothing for 0 s" in said and "modifier_rank" in said
    assert first == second == [1.0, 1.0]


@pytest.mark.parametrize("fails", [True, False], ids=["that fails", "that ends"])
def test_nobody_waits_for_a_first_peer(tmp_path: Path, fails: bool) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> str:
        file = opened(tmp_path, index, share, count=2)
        if index == 0 and fails:
            os.close(file._file.descriptor)
            with pytest.raises(StorageError):
                file.append(torch.ones(2))
            return ""
        if index == 0:
            file.close()
            return ""
        offset = file.append(torch.ones(2))
        return raises(lambda: file.read(offset, 2, torch.float32))

    assert "rank 0 of this node has failed or released the model" in all_run(2, job)[1]


def test_what_all_have_agreed_on_is_read_also_by_one_that_saw_an_edit_too_early(tmp_path: Path) -> None:
    """Number 1 reads the first edit before it makes it, so it counts none; then both make another."""

    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[float]:
        file = opened(tmp_path, index, share, count=2)
        offset = file.append(torch.zeros(2))
        if index == 0:
            file.read(offset, 2, torch.float32)
            file.write(offset, torch.ones(2))
            share(b"")
        else:
            share(b"")
            seen = file.read(offset, 2, torch.float32)
            file.write(offset, torch.ones_like(seen))
        file.read(offset, 2, torch.float32)
        if index == 0:
            time.sleep(0.3)
        file.write(offset, torch.full((2,), 2.0))
        file.sync_edits()
        return file.read(offset, 2, torch.float32).tolist()

    assert all_run(2, job) == [[2.0, 2.0]] * 2
