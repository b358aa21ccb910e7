"""Files and links that another user has put where this process writes: nothing is written through them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import ConfigError, StorageError
from offload.files.durable import Files
from offload.files.snapshot_files import SnapshotFiles, list_snapshots, remove_snapshot
from offload.files.trace_events import write_trace
from zero.assembly.monitors import CsvFiles
from zero.config.logging_block import CsvMonitor

FILES = ("zero-snapshots/a/rank-0/swap", "zero-snapshots/a/rank-0/manifest-1", "zero-snapshots/a/committed")
FOLDERS = ("zero-snapshots", "zero-snapshots/a", "zero-snapshots/a/rank-0")
PRECIOUS = b"of the user who trains"


def use(path: Path, *, shared: bool = False) -> None:
    """What a job does with a snapshot's files."""
    files = SnapshotFiles([path], "a", 0, shared=shared)
    try:
        os.ftruncate(files.descriptors[0], 1 << 20)
        files.write_manifest(1, {"step": 1}, b"state")
        files.commit({"number": 1, "step": 1, "ranks": 1})
    finally:
        files.has_commit = True
        files.close()


def link(target: Path, path: Path) -> None:
    path.symlink_to(target)


def hard_link(target: Path, path: Path) -> None:
    path.hardlink_to(target)


def pipe(_target: Path, path: Path) -> None:
    os.mkfifo(path)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plant", [link, hard_link, pipe])
@pytest.mark.parametrize("name", FILES)
def test_a_snapshot_is_not_written_through_a_planted_file(
    disk: Path, precious: Path, name: str, plant: Callable[[Path, Path], None], shared: bool
) -> None:
    (disk / FOLDERS[-1]).mkdir(parents=True)
    plant(precious, disk / name)
    with pytest.raises(ConfigError, match=f"{name}: expected a "):
        use(disk, shared=shared)
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("name", FOLDERS)
def test_a_snapshot_does_not_follow_a_planted_folder(disk: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere" / "a" / "rank-0").mkdir(parents=True)
    (disk / name).parent.mkdir(parents=True, exist_ok=True)
    (disk / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name}: expected a folder, got a link"):
        use(disk, shared=True)
    assert [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_made_where_a_planted_folder_leads(disk: Path, tmp_path: Path, name: str, shared: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    (disk / name).parent.mkdir(parents=True, exist_ok=True)
    (disk / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name}: expected a folder, got a link"):
        use(disk, shared=shared)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_others_can_write_to_is_refused_unless_it_is_allowed(disk: Path, name: str) -> None:
    (disk / FOLDERS[-1]).mkdir(parents=True, mode=0o755)
    (disk / name).chmod(0o777)
    with pytest.raises(ConfigError, match=rf"{name}: .*0777 \(chmod go-w\).*snapshot\.shared_folder"):
        use(disk)
    use(disk, shared=True)


def test_folders_of_the_user_that_umask_0002_gave_to_a_group_are_closed_to_it(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(disk)
    for name in FOLDERS:
        (disk / name).chmod(0o2775)
    use(disk)
    assert {(disk / name).stat().st_mode & 0o7777 for name in FOLDERS} == {0o2755}
    assert [
        f"{disk / name} had mode 2775" in record.message for name, record in zip(FOLDERS, caplog.records, strict=True)
    ] == [True] * 3


@pytest.mark.parametrize("plant", [link, hard_link])
def test_a_group_that_could_write_may_have_planted_files(
    disk: Path, precious: Path, plant: Callable[[Path, Path], None]
) -> None:
    use(disk)
    folder = disk / FOLDERS[-1]
    folder.chmod(0o775)
    plant(precious, folder / "manifest-0")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"its mode is 0775 \(chmod go-w\), and manifest-0 in it may have been put"
        ):
            use(disk)
    assert folder.stat().st_mode & 0o777 == 0o775


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_what_belongs_to_another_user_is_refused_unless_it_is_allowed(disk: Path, name: str) -> None:
    (disk / FOLDERS[-1]).mkdir(parents=True, mode=0o755)
    if name in FILES:
        (disk / name).touch()
    os.chown(disk / name, 12345, 12345)
    with pytest.raises(ConfigError, match=f"{name}: .*belongs to the user 12345"):
        use(disk)
    use(disk, shared=True)


def test_only_the_user_reads_and_writes_what_a_snapshot_makes(disk: Path) -> None:
    before = os.umask(0)
    try:
        use(disk)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in disk.rglob("*")}
    folders = {Path(name).name for name in FOLDERS}
    assert {modes.pop(name) for name in folders} == {0o755}
    assert set(modes) == {"swap", "part", "manifest-1", "committed"} and set(modes.values()) == {0o600}


@pytest.mark.parametrize("name", ["zero-snapshots/a", "zero-snapshots/a/rank-0"])
def test_removing_a_snapshot_removes_nothing_that_a_link_leads_to(disk: Path, tmp_path: Path, name: str) -> None:
    home = tmp_path / "home" / "rank-0"
    home.mkdir(parents=True)
    (home / "thesis").write_bytes(PRECIOUS)
    (disk / name).parent.mkdir(parents=True)
    (disk / name).symlink_to(home if name.endswith("rank-0") else home.parent)
    assert all(listed.ranks == () for listed in list_snapshots(disk) if name.endswith("rank-0"))
    if name.endswith("rank-0"):
        remove_snapshot(disk, "a")
    else:
        with pytest.raises(ConfigError, match="there is no snapshot 'a'"):
            remove_snapshot(disk, "a")
    assert (home / "thesis").read_bytes() == PRECIOUS


def test_locks_traces_and_monitors_do_not_follow_links(tmp_path: Path, precious: Path) -> None:
    for name in ("lock", "trace.json", "job/a_b.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(precious if name != "lock" else tmp_path / "made")
    with pytest.raises(StorageError, match="lock"):
        Files().lock(tmp_path / "lock")
    assert not (tmp_path / "made").exists()
    with pytest.raises(OSError, match=r"trace\.json"):
        write_trace(tmp_path / "trace.json", {})
    monitor = CsvFiles(CsvMonitor(enabled=True, output_path=str(tmp_path), job_name="job"))
    with pytest.raises(OSError, match=r"a_b\.csv"):
        monitor.write_events([("a/b", 1.0, 1)])
    assert precious.read_bytes() == PRECIOUS
