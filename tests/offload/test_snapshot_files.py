"""The small files of a snapshot: what a torn write leaves, and what nobody may take for something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.errors import ConfigError, StorageError
from offload.files.snapshot_files import SnapshotFiles, SnapshotSwap
from offload.io.swapfile import free_bytes


def committed(path: Path, *numbers: int) -> bytes:
    """Commit these, and return what the file holds."""
    files = SnapshotFiles([path], "a", 0)
    for number in numbers:
        files.write_manifest(number, {"step": number}, b"state" * number)
        files.commit({"number": number, "step": 10 * number, "ranks": 1})
    files.has_commit = True
    files.close()
    return (path / "zero-snapshots" / "a" / "committed").read_bytes()


def test_the_highest_number_counts_and_has_its_state(tmp_path: Path) -> None:
    committed(tmp_path, 1, 2, 3)
    files = SnapshotFiles([tmp_path], "a", 0)
    head = files.committed_head
    assert head is not None and (head["number"], head["step"]) == (3, 30)
    manifest = files.manifest(3)
    assert manifest is not None and manifest.state == b"state" * 3 and manifest.body["step"] == 3
    assert files.manifest(2) is not None and files.manifest(1) is None
    files.close()
    assert (tmp_path / "zero-snapshots").exists(), "it counts, or may count"


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_torn_commit_leaves_the_one_before_or_is_whole(tmp_path: Path, number: int, backwards: bool) -> None:
    """Blocks may reach the disk in any order, each old, zero or new."""
    before = committed(tmp_path, *range(1, number))
    after = committed(tmp_path, number)
    path, seen = tmp_path / "zero-snapshots" / "a" / "committed", set()
    place = number % 2 * 2 * 4096
    differ = [at for at in range(len(after)) if after[at : at + 1] != before[at : at + 1]]
    for cut in [differ[0], *differ[::7], differ[-1] + 1]:
        for hole in (before[place:cut], bytes(cut - place)):
            mixed = after[:cut] + before[cut:] if not backwards else after[:place] + hole + after[cut:]
            path.write_bytes(mixed)
            files = SnapshotFiles([tmp_path], "a", 0)
            head = files.committed_head
            seen.add(None if head is None else head["number"])
            files.close()
    assert seen <= {number - 1, number} and number in seen


def test_what_is_damaged_for_good_is_told(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    path = tmp_path / "zero-snapshots" / "a" / "committed"
    path.write_bytes(path.read_bytes().replace(b"ranks", b"rinks"))
    files = SnapshotFiles([tmp_path], "a", 0)
    with pytest.raises(StorageError, match="checksum"):
        files.committed_head  # noqa: B018 - the question itself
    files.close()


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("offload.files.snapshot_files.FORMAT", 7)
        committed(tmp_path, 1)
    files = SnapshotFiles([tmp_path], "a", 0)
    with pytest.raises(ConfigError, match="format 7, and this version reads 3"):
        files.committed_head  # noqa: B018 - the question itself
    files.close()


def test_no_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    files = SnapshotFiles([tmp_path], "a", 0)
    with pytest.raises(ConfigError, match=r"need [\d,]+ bytes, have [\d,]+ at"):
        SnapshotSwap(files, free_bytes(tmp_path) * 2)
    assert os.listdir(tmp_path) == []


def test_room_that_the_files_have_is_not_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path, 1)
    swap = SnapshotSwap(SnapshotFiles([tmp_path], "a", 0), 1 << 20)
    geometry = swap.geometry
    swap.close()
    monkeypatch.setattr("offload.io.swapfile.free_bytes", lambda path: 8192)
    again = SnapshotSwap(SnapshotFiles([tmp_path], "a", 0), 1 << 20, (geometry.counts, geometry.stripe_bytes))
    assert again.capacity_bytes == 1 << 20
    again.close()


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.files.snapshot_files.LOCK_SECONDS", 0.1)
    files = SnapshotFiles([tmp_path], "a", 0)
    with pytest.raises(ConfigError, match="in use by another job"):
        SnapshotFiles([tmp_path], "a", 0)
    copies = [os.dup(descriptor) for descriptor in files.descriptors]  # as a child of fork has them
    files.close()
    SnapshotFiles([tmp_path], "a", 0).close()
    for copy in copies:
        os.close(copy)
