"""The disk that forgets: what it keeps and what it loses is what file systems keep and lose."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forgetful import BLOCK_BYTES, Crash, ForgetfulFiles, every_point, tree

from offload.errors import StorageError
from offload.files.durable import Files

SEEDS = 60
OLD, NEW = b"o" * 3 * BLOCK_BYTES, b"n" * 2 * BLOCK_BYTES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def images(files: ForgetfulFiles) -> Iterator[dict[str, bytes]]:
    """Possible contents after a crash, for many seeds."""
    for seed in range(SEEDS):
        yield tree(files.image(files.root.with_name(f"image{len(list(files.root.parent.iterdir()))}"), seed))


def outcomes(files: ForgetfulFiles) -> set[tuple[tuple[str, bytes], ...]]:
    return {tuple(image.items()) for image in images(files)}


def put(files: Files, path: Path, contents: bytes, *, sync: bool = False) -> None:
    """Write a file as a careless program does."""
    file = files.create(path, len(contents))
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, contents)
    os.close(descriptor)
    files.on_write(file, 0, torch.empty(0))
    if sync:
        file.sync()
    file.close()


def test_what_was_there_at_the_start_lasts(root: Path) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "file").write_bytes(OLD)
    assert outcomes(ForgetfulFiles(root)) == {(("folder", b"/"), ("folder/file", OLD))}


def test_a_new_file_may_be_gone_although_it_was_synced(root: Path) -> None:
    files = ForgetfulFiles(root)
    put(files, root / "file", NEW, sync=True)
    assert outcomes(files) == {(), (("file", NEW),)}


def test_a_file_whose_folder_alone_was_synced_has_any_mixture_of_blocks_and_either_length(root: Path) -> None:
    files = ForgetfulFiles(root)
    put(files, root / "file", NEW)
    files.sync_folder(root)
    found = {image["file"] for image in images(files)}
    new, zeros = NEW[:BLOCK_BYTES], bytes(BLOCK_BYTES)
    assert found == {b"", new + new, new + zeros, zeros + new, zeros + zeros}


def test_a_file_that_was_synced_and_then_written_may_have_old_and_new_blocks(root: Path) -> None:
    files = ForgetfulFiles(root)
    put(files, root / "file", OLD, sync=True)
    files.sync_folder(root)
    assert {image["file"] for image in images(files)} == {OLD}
    file = files.open(root / "file")
    (root / "file").write_bytes(NEW)
    files.on_write(file, 0, torch.empty(0))
    found = {image["file"] for image in images(files)}
    assert {len(contents) for contents in found} == {len(OLD), len(NEW)}
    assert any(b"o" in contents and b"n" in contents for contents in found)
    assert all(set(contents) <= set(b"on\0") for contents in found)
    file.sync()
    file.close()
    assert {image["file"] for image in images(files)} == {NEW}


def test_what_is_written_after_the_last_sync_of_a_file_is_not_covered_by_it(root: Path) -> None:
    files = ForgetfulFiles(root)
    file = files.create(root / "file", BLOCK_BYTES)
    file.sync()
    files.sync_folder(root)
    (root / "file").write_bytes(b"n" * BLOCK_BYTES)
    assert {image["file"] for image in images(files)} == {bytes(BLOCK_BYTES)}
    file.close()


def test_a_rename_without_a_sync_of_the_folder_may_have_happened_or_not_but_not_half(root: Path) -> None:
    (root / "file").write_bytes(NEW)
    (root / "other").write_bytes(OLD)
    files = ForgetfulFiles(root)
    files.perform("rename", root / "file", lambda: (root / "file").replace(root / "other"), root / "other")
    assert outcomes(files) == {(("file", NEW), ("other", OLD)), (("other", NEW),)}
    files.sync_folder(root)
    assert outcomes(files) == {(("other", NEW),)}


def test_two_renames_without_a_sync_may_happen_in_the_other_order(root: Path) -> None:
    (root / "a").write_bytes(b"a")
    (root / "b").write_bytes(b"b")
    files = ForgetfulFiles(root)
    for name in "ab":
        old, new = root / name, root / f"{name}{name}"
        files.perform("rename", old, lambda old=old, new=new: old.replace(new), new)
    assert {tuple(image) for image in images(files)} == {("a", "b"), ("a", "bb"), ("aa", "b"), ("aa", "bb")}


def test_a_file_renamed_before_it_was_synced_has_the_name_and_not_the_bytes(root: Path) -> None:
    """The empty file of so many programs that write beside, rename, and forget the sync."""
    (root / "latest").write_bytes(b"old")
    files = ForgetfulFiles(root)
    put(files, root / "beside", b"new")
    files.rename(root / "beside", root / "latest")
    assert {image["latest"] for image in images(files)} == {b"", b"new", b"\0\0\0"}


def test_a_removed_file_is_back_until_the_folder_is_synced(root: Path) -> None:
    (root / "file").write_bytes(OLD)
    files = ForgetfulFiles(root)
    files.perform("unlink", root / "file", (root / "file").unlink)
    assert outcomes(files) == {(), (("file", OLD),)}
    files.sync_folder(root)
    assert outcomes(files) == {()}


def test_what_lies_in_a_folder_is_lost_with_the_folders_name(root: Path) -> None:
    files = ForgetfulFiles(root)
    files.perform("make folder", root / "folder", (root / "folder").mkdir)
    put(files, root / "folder" / "file", NEW, sync=True)
    files.sync_folder(root / "folder")
    assert outcomes(files) == {(), (("folder", b"/"), ("folder/file", NEW))}


def test_the_image_of_a_seed_is_always_the_same(root: Path) -> None:
    files = ForgetfulFiles(root)
    put(files, root / "file", NEW * 9)
    put(files, root / "other", NEW * 9)
    assert tree(files.image(root.with_name("a"), 5)) == tree(files.image(root.with_name("b"), 5))


# ---- the promises of the real one, checked at every point -----------------------------------------------------------


def after_crashes(root: Path, work: Callable[[Files], None]) -> Iterator[dict[str, bytes]]:
    """Possible contents if the power fails before any operation of `work`; the last ones are after all operations."""
    start = root.with_name("start")
    root.rename(start)
    counted = ForgetfulFiles(ForgetfulFiles(start).image(root))
    work(counted)
    for point in every_point(len(counted.operations)):
        for seed in range(6):
            place = root.with_name(f"crash{point}-{seed}")
            files = ForgetfulFiles(ForgetfulFiles(start).image(place), crash_at=point)
            if point > len(counted.operations):
                work(files)
            else:
                with pytest.raises(Crash):
                    work(files)
                with pytest.raises(Crash):
                    files.make_folder(place / "more")
            yield tree(files.image(root.with_name(f"image{point}-{seed}"), seed))


def test_a_small_file_is_old_or_new_at_every_crash(root: Path) -> None:
    (root / "file").write_bytes(OLD)
    found = [image["file"] for image in after_crashes(root, lambda files: files.write_bytes(files.root / "file", NEW))]
    assert set(found) == {OLD, NEW} and found[-1] == NEW


def test_a_folder_that_was_made_and_a_rename_that_returned_last(root: Path) -> None:
    def work(files: ForgetfulFiles) -> None:
        files.make_folder(files.root / "a" / "b" / "c")
        files.write_bytes(files.root / "a" / "b" / "c" / "file", "text")
        files.rename(files.root / "a" / "b", files.root / "a" / "d")

    *_, last = after_crashes(root, work)
    assert last == {"a": b"/", "a/d": b"/", "a/d/c": b"/", "a/d/c/file": b"text"}


def test_of_a_half_removed_tree_the_mark_is_gone_first(root: Path) -> None:
    (root / "tree" / "inner").mkdir(parents=True)
    whole = {"tree/one": b"1", "tree/inner/two": b"2", "tree/mark": b"m", "tree/more": b"3"}
    for name, contents in whole.items():
        (root / name).write_bytes(contents)
    found = list(after_crashes(root, lambda files: files.remove(files.root / "tree", first=("mark",))))
    assert all(image.items() >= whole.items() for image in found if "tree/mark" in image)
    assert any("tree" in image and "tree/mark" not in image for image in found) and found[-1] == {}


def test_a_full_disk_refuses_until_something_is_removed_and_what_was_refused_is_not_there(root: Path) -> None:
    (root / "file").write_bytes(OLD)
    counted = ForgetfulFiles(root)
    counted.write_bytes(root / "file", OLD)
    room = [n for n, (what, _) in enumerate(counted.operations, 1) if what not in ("unlink", "sync folder")]
    for point in room:
        files = ForgetfulFiles(root, full_at=point)
        with pytest.raises(StorageError, match="ENOSPC") as refusal:
            files.write_bytes(root / "file", NEW)
        assert refusal.value.errno == errno.ENOSPC and refusal.value.free_bytes == 0
        assert tree(root) == {"file": OLD} and files.refused == 1
        if ("unlink", f"file.partial-{os.getpid()}") not in files.operations:
            with pytest.raises(StorageError, match="ENOSPC"):
                files.create(root / "more", 1)
            files.remove(root / "file")
        files.write_bytes(root / "file", OLD)


def test_points_are_all_or_spread_evenly_with_both_ends() -> None:
    assert every_point(4) == [1, 2, 3, 4, 5]
    assert every_point(99, 12)[0] == 1 and every_point(99, 12)[-1] == 100 and len(every_point(99, 12)) == 12


# ---- the real one on the real disk ----------------------------------------------------------------------------------


def test_a_created_file_has_its_room_and_nothing_is_left_when_there_is_none(root: Path) -> None:
    file = Files().create(root / "file", 3 * BLOCK_BYTES)
    assert file.nbytes == 3 * BLOCK_BYTES and os.stat(file.path).st_blocks * 512 >= 3 * BLOCK_BYTES
    file.truncate(5)
    file.sync()
    file.close()
    file.close()
    assert Files().file_bytes(root / "file") == 5 and Files().file_bytes(root) is None
    with pytest.raises(StorageError, match=r"reserve.*more.*free space"):
        Files().create(root / "more", 1 << 60)
    assert os.listdir(root) == ["file"]


def test_errors_name_the_path_and_the_cause(root: Path) -> None:
    files = Files()
    for wrong in (lambda p: files.read_bytes(p), lambda p: files.open(p), lambda p: files.rename(p, root / "b")):
        with pytest.raises(StorageError, match=r"ENOENT.*nobody") as error:
            wrong(root / "nobody")
        assert error.value.errno == errno.ENOENT
    assert files.listing(root / "nobody") == [] and files.free_bytes(root / "nobody" / "deep") > 0


def test_a_lock_keeps_others_out_until_it_is_closed(root: Path) -> None:
    files = Files()
    first = files.lock(root / "lock")
    assert first is not None and first.is_certain
    assert files.lock(root / "lock", wait_seconds=0.05) is None
    first.close()
    with files.lock(root / "lock") or pytest.fail("still locked"):
        assert files.lock(root / "lock") is None
