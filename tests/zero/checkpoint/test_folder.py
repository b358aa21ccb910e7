"""Checkpoints of checkpoints: what is loaded is whole, whenever the power fails and wherever the disk is full."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from forgetful import Crash, ForgetfulFiles, every_point, tree

from offload.errors import ConfigError, StateError, StorageError
from offload.files.durable import Files
from zero.checkpoint.dcp_format import FileEntry, Manifest, check_files, read_manifest, write_manifest
from zero.checkpoint.folder import CheckpointFolder, PartialCheckpoint, check_tag

NAMES = (".metadata", "__RANK_0.distcp")


def contents(step: int) -> bytes:
    return str(step).encode() * 5000


def fill(files: Files, partial: PartialCheckpoint, step: int) -> None:
    """The files of a checkpoint, as the saver writes them."""
    for name in NAMES:
        file = files.create(partial.folder / name, len(contents(step)))
        (partial.folder / name).write_bytes(contents(step))
        files.on_write(file, 0, None)  # type: ignore[arg-type]
        file.sync()
        file.close()
    entries = {name: FileEntry(bytes=len(contents(step)), boxes=((0, 9, 7),)) for name in NAMES}
    manifest = Manifest(tag=partial.tag, global_steps=step, time=partial.time, world_size=1, files=entries)
    write_manifest(files, partial.folder, manifest)


def save(files: Files, save_dir: Path, tag: str, step: int, *, keep_last: int = 9, save_latest: bool = True) -> None:
    folders = CheckpointFolder(save_dir, files)
    partial = folders.create_partial(tag)
    try:
        fill(files, partial, step)
        folders.commit(partial, save_latest)
    except Exception:
        folders.abandon(partial)
        raise
    folders.keep_last(keep_last)


def step_of(folder: Path) -> int:
    """What was saved there; all of it, or an error."""
    files = Files()
    manifest = read_manifest(files, folder)
    check_files(files, folder, manifest)
    assert all((folder / name).read_bytes() == contents(manifest.global_steps) for name in manifest.files)
    return manifest.global_steps


def found_step(save_dir: Path) -> int:
    found = CheckpointFolder(save_dir).newest_valid()
    assert found is not None
    return step_of(found.folder)


def visible(save_dir: Path) -> dict[str, int]:
    """Tag -> step of every folder without a dot; each is whole."""
    return {p.name: step_of(p) for p in sorted(save_dir.iterdir()) if p.is_dir() and not p.name.startswith(".")}


def hidden(save_dir: Path) -> set[str]:
    return {name for name in os.listdir(save_dir) if name.startswith(".") or ".partial" in name} - {".lock"}


# ---- crashes and full disks -----------------------------------------------------------------------------------------

SAVES = (("one", 1, 9), ("two", 2, 2), ("one", 3, 1))
"""(tag, step, keep_last): the last overwrites a tag and removes the other."""


def save_all(files: Files, save_dir: Path, done: list[int]) -> None:
    for tag, step, keep_last in SAVES:
        save(files, save_dir, tag, step, keep_last=keep_last)
        done.append(step)


def test_at_every_crash_the_old_or_the_new_checkpoint_is_found_whole_and_the_next_save_sweeps(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    counted = ForgetfulFiles(disk)
    save_all(counted, disk / "saves", [])
    assert visible(disk / "saves") == {"one": 3} and hidden(disk / "saves") == set()
    assert set(os.listdir(disk / "saves" / "one")) == {*NAMES, "manifest.json"}
    found = set()
    for point in every_point(len(counted.operations)):
        (disk := tmp_path / f"disk{point}").mkdir()
        files, done = ForgetfulFiles(disk, crash_at=point), list[int]()
        with suppress(Crash):
            save_all(files, disk / "saves", done)
        assert files.crashed == (point <= len(counted.operations))
        for seed in range(3):
            saves = files.image(tmp_path / f"image{point}-{seed}", seed) / "saves"
            last = done[-1] if done else 0
            if not last and CheckpointFolder(saves).newest_valid() is None:
                assert not saves.exists() or visible(saves) == {}
            else:
                step = found_step(saves)
                assert step in (last, last + 1)
                assert step in visible(saves).values() or (saves / ".one.replaced").exists()
                found.add((last, step))
            save(ForgetfulFiles(saves.parent), saves, "later", 4, save_latest=False)
            assert hidden(saves) == set() and visible(saves)["later"] == 4
    assert found == {(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)}


def test_at_every_full_disk_the_save_fails_and_leaves_nothing_and_a_later_one_works(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    counted = ForgetfulFiles(disk)
    save_all(counted, disk / "saves", [])
    failed = 0
    for point in every_point(len(counted.operations)):
        (disk := tmp_path / f"disk{point}").mkdir()
        saves, files, done = disk / "saves", ForgetfulFiles(disk, full_at=point), list[int]()
        try:
            save_all(files, saves, done)
        except StorageError as error:
            assert "ENOSPC" in str(error)
            failed += 1
            last = done[-1] if done else 0
            assert not saves.exists() or hidden(saves) <= {".one.replaced"}
            assert not last or found_step(saves) in (last, last + 1)
        else:
            assert not files.refused or done == [1, 2, 3]
        files.make_room()
        save(files, saves, "one", 5)
        assert hidden(saves) == set() and visible(saves)["one"] == 5 and found_step(saves) == 5
    assert failed > len(counted.operations) // 3


def test_the_lock_of_a_process_that_crashed_does_not_stop_the_next(tmp_path: Path) -> None:
    partial = CheckpointFolder(tmp_path).create_partial("tag")
    with pytest.raises(StateError, match=r"'tag' is being written.*another process"):
        CheckpointFolder(tmp_path).create_partial("tag")
    other = CheckpointFolder(tmp_path).create_partial("other")
    assert (tmp_path / ".tag.partial").exists(), "its job lives"
    CheckpointFolder(tmp_path).abandon(other)
    partial.lock.close()  # as the kernel does
    save(Files(), tmp_path, "third", 1)
    assert hidden(tmp_path) == set()


def test_why_a_save_failed_is_said_although_what_it_left_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ForgetfulFiles(tmp_path, full_at=7)

    def refuse(path: Path, first: object = ()) -> None:
        raise StorageError("remove", errno=5, path=str(path), offset=0, free_bytes=None)

    monkeypatch.setattr(files, "remove", refuse)
    with pytest.raises(StorageError, match="ENOSPC"):
        save(files, tmp_path, "tag", 1)
    assert hidden(tmp_path) == {".tag.partial"}
    save(Files(), tmp_path, "other", 2)
    assert hidden(tmp_path) == set()


# ---- what is loaded -------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(Files(), tmp_path, f"step{step}", step)
    return tmp_path


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda f: (f / NAMES[1]).unlink(), r"__RANK_0.distcp: expected 10,000 bytes, got no file"),
    "a file is short": (lambda f: (f / NAMES[1]).write_bytes(b"1"), r"__RANK_0.distcp: expected 10,000 bytes, got 1"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"cannot read manifest.json.*ENOENT"),
    "torn manifest": (lambda f: (f / "manifest.json").write_text('{"form'), r"manifest.json is damaged"),
    "no steps": (
        lambda f: (f / "manifest.json").write_text('{"format": "zero-infinity checkpoint", "version": 1}'),
        r"manifest.json is damaged: tag: Field required; global_steps",
    ),
    "another's manifest": (lambda f: (f / "manifest.json").write_text("[]"), r"expected the format.*got None"),
    "a newer version": (
        lambda f: (f / "manifest.json").write_text('{"format": "zero-infinity checkpoint", "version": 2}'),
        r"reads checkpoints of version 1, got 2; load it with the version that wrote it",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_latest_gives_way_to_the_newest_that_is_whole_and_it_is_said(three: Path, kind: str) -> None:
    how, message = DAMAGES[kind]
    how(three / "step30")
    found = CheckpointFolder(three).newest_valid()
    assert found is not None and found.tag == "step20" and step_of(found.folder) == 20
    (note,) = found.notes
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(note)
    assert "latest names 'step30'" in note and "loading 'step20' instead" in note


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_that_was_asked_for_is_refused_with_the_tag_that_would_do(three: Path, kind: str) -> None:
    how, message = DAMAGES[kind]
    how(three / "step20")
    with pytest.raises(ConfigError, match=rf"(?s)step20.*{message}.*newest complete checkpoint is tag='step30'"):
        CheckpointFolder(three).newest_valid("step20")
    found = CheckpointFolder(three).newest_valid("step10")
    assert found is not None and found.manifest.global_steps == 10 and not found.notes


def test_without_latest_the_one_saved_last_is_taken_and_latest_wins_over_newer_ones(three: Path) -> None:
    save(Files(), three, "side", 40, save_latest=False)
    assert found_step(three) == 30
    (three / "latest").unlink()
    assert found_step(three) == 40
    save(Files(), three, "back", 5, save_latest=False)  # somebody went back to an older state and on from there
    assert found_step(three) == 5 and CheckpointFolder(three).tags() == ["back", "side", "step30", "step20", "step10"]


@pytest.mark.parametrize("text", ["", "../other", "gone", "\xff\n"])
def test_a_latest_that_names_nothing_is_said(three: Path, text: str) -> None:
    (three / "latest").write_bytes(text.encode("latin-1"))
    found = CheckpointFolder(three).newest_valid()
    assert found is not None and found.tag == "step30" and "latest names" in found.notes[0]


def test_nothing_is_none_and_only_damaged_ones_are_an_error(three: Path) -> None:
    assert CheckpointFolder(three / "nowhere").newest_valid() is None
    (three / "empty").mkdir()
    assert CheckpointFolder(three / "empty").newest_valid() is None
    with pytest.raises(ConfigError, match=r"there is no checkpoint 'x'.*there is no other checkpoint"):
        CheckpointFolder(three / "empty").newest_valid("x")
    for step in (10, 20, 30):
        (three / f"step{step}" / NAMES[0]).unlink()
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint.*can be loaded.*step30.*\.metadata.*step20.*step10"):
        CheckpointFolder(three).newest_valid()


def test_a_replaced_one_counts_while_its_successor_is_missing_or_damaged(three: Path) -> None:
    (three / "step30").rename(three / ".step30.replaced")
    for asked in (None, "step30"):
        found = CheckpointFolder(three).newest_valid(asked)
        assert found is not None and step_of(found.folder) == 30 and "was interrupted" in found.notes[0]
    (three / "step30").mkdir()
    found = CheckpointFolder(three).newest_valid()
    assert found is not None and step_of(found.folder) == 30 and "cannot read manifest.json" in found.notes[0]
    (three / "step30").rmdir()
    save(Files(), three, "step40", 40)
    assert visible(three) == {"step10": 10, "step20": 20, "step30": 30, "step40": 40} and hidden(three) == set()


def test_a_damaged_successor_is_replaced_before_the_whole_one_aside_goes(three: Path, tmp_path: Path) -> None:
    (three / "step30").rename(three / ".step30.replaced")
    (three / "step20").rename(three / "step30")
    (three / "step30" / NAMES[1]).unlink()
    start = ForgetfulFiles(three)
    for point in every_point(60):
        files = ForgetfulFiles(start.image(tmp_path / f"disk{point}"), crash_at=point)
        with suppress(Crash):
            save(files, files.root, "step30", 31)
        found = CheckpointFolder(files.image(tmp_path / f"image{point}", point)).newest_valid("step30")
        assert found is not None and step_of(found.folder) in (30, 31)
    assert not files.crashed and visible(files.root) == {"step10": 10, "step30": 31} and hidden(files.root) == set()


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_keep_last_removes_the_oldest_but_not_latest_and_nothing_of_others(three: Path) -> None:
    (three / "notes").mkdir()
    (three / "notes" / "manifest.json").write_text(json.dumps({"format": "another"}))
    (three / "runs").mkdir()
    (three / "latest").write_text("step10")
    assert CheckpointFolder(three).keep_last(1) == ["step20"]
    assert sorted(os.listdir(three)) == [".lock", "latest", "notes", "runs", "step10", "step30"]
    assert CheckpointFolder(three).keep_last(2) == []
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        CheckpointFolder(three).keep_last(0)


def test_keep_last_does_not_count_damaged_ones(three: Path) -> None:
    (three / "step30" / NAMES[0]).unlink()
    assert CheckpointFolder(three).keep_last(1) == ["step10"]
    assert found_step(three) == 20


def test_a_run_that_went_back_keeps_what_it_saves(three: Path) -> None:
    save(Files(), three, "step15", 15, keep_last=2)
    assert visible(three) == {"step15": 15, "step30": 30}


def test_a_clock_that_was_set_back_does_not_make_a_checkpoint_old(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    save(Files(), three, "step40", 40, keep_last=1)
    assert visible(three) == {"step40": 40}
    save(Files(), three, "step50", 50, save_latest=False)
    assert CheckpointFolder(three).tags() == ["step50", "step40"]


def test_many_saves_under_a_clock_that_was_set_back_keep_their_order(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    tags = [f"later{number}" for number in range(8)]
    for tag in tags:
        save(Files(), three, tag, 40, keep_last=99, save_latest=False)
    (three / tags[-1] / "manifest.json").write_text("torn")
    save(Files(), three, "last", 50, keep_last=99, save_latest=False)
    assert CheckpointFolder(three).tags() == ["last", *reversed(tags[:-1]), "step30", "step20", "step10"]


class CountedFiles(Files):
    """It counts the manifests that are read."""

    manifests = 0

    def read_bytes(self, path: Path, *limit: int) -> bytes:
        self.manifests += path.name == "manifest.json"
        return super().read_bytes(path, *limit)


@pytest.mark.parametrize("save_latest", [True, False])
def test_a_save_reads_as_few_manifests_after_many_checkpoints_as_after_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_latest: bool
) -> None:
    reads = []
    for number in range(20):
        monkeypatch.setattr("time.time", lambda seconds=1e9 + 60.0 * number: seconds)
        files = CountedFiles()
        partial = CheckpointFolder(tmp_path, files).create_partial(f"step{number}")
        reads.append(files.manifests)
        fill(files, partial, number)
        CheckpointFolder(tmp_path, files).commit(partial, save_latest)
    assert reads == [0] + [1] * 19


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "/a", "a\\b", " a", "a\n", "latest", "x" * 201])
def test_tags_that_cannot_name_a_folder_are_refused(tmp_path: Path, tag: str) -> None:
    for use in (CheckpointFolder(tmp_path).create_partial, CheckpointFolder(tmp_path).newest_valid):
        with pytest.raises(ConfigError, match="checkpoint tag"):
            use(tag)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tag", ["global_step10", "pytorch_model", "best.v2", "a b", "schritt-ä", 100])
def test_usual_tags_are_names(tag: object) -> None:
    assert check_tag(tag) == str(tag)


def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    save(Files(), tmp_path, "mine", 1)  # it was empty
    (tmp_path / "mine" / "manifest.json").write_text("torn")
    save(Files(), tmp_path, "mine", 2)
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"theirs")
    (tmp_path / "file").write_bytes(b"theirs")
    before = tree(tmp_path)
    for tag in ("global_step3", "file"):
        with pytest.raises(ConfigError, match=r"is not a checkpoint of this engine.*choose another tag"):
            CheckpointFolder(tmp_path).create_partial(tag)
    assert tree(tmp_path) == before


def test_a_checkpoint_that_is_not_as_its_manifest_says_gets_no_name(three: Path) -> None:
    folders = CheckpointFolder(three)
    partial = folders.create_partial("step30")
    fill(Files(), partial, 31)
    (partial.folder / NAMES[0]).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\.metadata: expected 10,000 bytes, got 0"):
        folders.commit(partial)
    folders.abandon(partial)
    assert visible(three)["step30"] == 30 and hidden(three) == set()


def test_manifests_name_files_of_their_folder_only(tmp_path: Path) -> None:
    manifest = Manifest(tag="a", global_steps=1, time=0.0, world_size=1, files={"../x": FileEntry(bytes=1)})
    write_manifest(Files(), tmp_path, manifest)
    with pytest.raises(ConfigError, match=r"'\.\./x' is not a valid name of a file in this folder"):
        read_manifest(Files(), tmp_path)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = {"__RANK_0.distcp": FileEntry(bytes=9000, boxes=((4096, 100, 5), (8192, 7, 2**32 - 1)))}
    manifest = Manifest(tag="a", global_steps=3, time=1.5, world_size=2, files=entries)
    write_manifest(Files(), tmp_path, manifest)
    assert read_manifest(Files(), tmp_path) == manifest
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert isinstance(written.pop("crc32c"), int)
    assert written == {
        "format": "zero-infinity checkpoint",
        "version": 1,
        "tag": "a",
        "global_steps": 3,
        "time": 1.5,
        "world_size": 2,
        "files": {"__RANK_0.distcp": {"bytes": 9000, "boxes": [[4096, 100, 5], [8192, 7, 2**32 - 1]]}},
    }
