"""The checkpoint question runs to its end on a tiny model; nothing is timed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, checkpoint_contestants
from benchmarks.checkpoint_contestants import YardStick, check_loaded
from benchmarks.checkpoint_worker import sync_folder
from benchmarks.common import RivalMissing
from benchmarks.rivals import deepspeed_setup, fio

pytestmark = pytest.mark.broad

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture(autouse=True)
def keep_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the machine that tests."""
    monkeypatch.setattr(checkpoint_contestants, "DROP_CACHES", tmp_path / "drop")
    monkeypatch.setattr(deepspeed_setup, "why_missing", lambda: "left out by the test")


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    file, disk = folder / "answer.json", folder / "disk"
    tiny = ["--shape", "tiny", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["checkpoint", "--json", str(file), "--path", str(disk), *tiny, *arguments])
    checkpoint.main()
    assert list(disk.iterdir()) == []
    return dict(json.loads(file.read_text()))


@needs_fio
def test_saves_and_loads_are_held_against_fio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "--part", "disk", "async", "--tier", "nvme")
    marks = {mark["what"]: mark for mark in content["marks"]}
    assert set(marks) == {
        "nvme: save GB/s / fio's write of a new file",
        "nvme: save GB/s / fio's write of a new file, both synced",
        "nvme: save GB/s / fio's write of an old file",
        "nvme: load GB/s / fio's read of the same file",
        "nvme: time of fio's read + write / save",
        "nvme: time of fio's read + write / load",
        "nvme: async, extra time / (bytes / mixed bandwidth)",
        "nvme: async, seconds that the call takes",
    }
    tried = content["series"][0]["tried"][0]
    moved = tried["write"]["figures"]["write_bytes"], tried["read"]["figures"]["read_bytes"]
    assert min(moved) > 0.5 * content["figures"]["nvme: bytes of a checkpoint"]
    assert tried["write"]["figures"]["synced_seconds"] > tried["write"]["seconds"]


def test_without_fio_our_own_engine_is_the_yardstick_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fio, "version", lambda: None)
    with YardStick(tmp_path, 100_000) as stick:
        file = tmp_path / "file"
        file.write_bytes(bytes(20_480))
        for run in (stick.write(), stick.over("write"), stick.over("mixed"), stick.read(file)):
            assert run["seconds"] > 0
        assert "our own" in stick.what
    assert list(tmp_path.iterdir()) == [file]


def test_saves_and_resumes_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "--part", "deepspeed", "--tier", "cpu")
    assert content["missing"] == {"deepspeed": "left out by the test"}
    save, resume = (series["tried"][0]["ours"]["figures"] for series in content["series"])
    assert save["durable_seconds"] > 0 and save["bytes"] > 0
    assert resume["loss"] == resume["saved_loss"] and resume["peak_rss_bytes"] > 0


def test_a_resume_with_another_loss_is_none() -> None:
    check_loaded("ours", {"loss": 1.5, "saved_loss": 1.5})
    with pytest.raises(RivalMissing, match="resumed with loss 2"):
        check_loaded("ours", {"loss": 2.0, "saved_loss": 1.5})


def test_the_bytes_of_all_files_are_synced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(10))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(5))
    assert sync_folder(tmp_path) == 15
