"""`zero snapshots` lists what is there and removes what nobody uses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import train
from models import build
from snapshot_runs import allocated_bytes, config_of

from zero.tools.cli import main

Open = Callable[..., Any]


def named(nvme_path: Path, name: str, every: int = 1) -> dict[str, Any]:
    config = config_of(nvme_path, every)
    config["zero_optimization"]["offload_optimizer"]["snapshot"]["name"] = name
    return config


def test_list_says_what_is_there(open_engine: Open, nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "list", str(nvme_path)]) == 0
    assert "no snapshots below" in capsys.readouterr().out
    train(open_engine(build("gpt"), named(nvme_path, "a")), 0, 1, 2).close()
    train(open_engine(build("gpt"), named(nvme_path, "b", 10)), 0)
    (nvme_path / "zero-snapshots" / "c" / "rank-0").mkdir(parents=True)
    (nvme_path / "zero-snapshots" / "c" / "rank-old").mkdir()  # somebody's own copy
    (nvme_path / "zero-snapshots" / "c" / "committed").write_text("{}\nnone\n")
    assert main(["snapshots", "list", str(nvme_path)]) == 0
    a, b, c = capsys.readouterr().out.splitlines()
    assert a.startswith("a: step 3, committed 2") and "1 ranks" in a and "in use" not in a
    assert b.startswith("b: no snapshot was committed") and b.endswith("in use")
    assert c.startswith("c: ") and "checksum" in c
    assert main(["snapshots", "list", str(nvme_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == ["a", "b", "c"]
    assert listed[0]["head"]["step"] == 3
    assert sum(entry["allocated_bytes"] for entry in listed) <= allocated_bytes(nvme_path)


def test_rm_removes_one_and_gives_its_space_back(
    open_engine: Open, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        train(open_engine(build("gpt"), named(nvme_path, name)), 0, 1).close()
    before = allocated_bytes(nvme_path)
    assert main(["snapshots", "rm", str(nvme_path), "a"]) == 0
    assert "a: removed" in capsys.readouterr().out
    assert 0 < allocated_bytes(nvme_path) < before
    assert os.listdir(nvme_path / "zero-snapshots") == ["b"]
    assert main(["snapshots", "rm", str(nvme_path), "b"]) == 0
    assert os.listdir(nvme_path) == []


def test_rm_takes_the_folder_by_any_of_its_names(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has the name of the configuration."""
    (tmp_path / "link").symlink_to(nvme_path)
    monkeypatch.chdir(nvme_path)
    for path in (".", str(tmp_path / "link")):
        train(open_engine(build("gpt"), named(nvme_path, "a")), 0, 1).close()
        assert main(["snapshots", "rm", path, "a"]) == 0
        assert os.listdir(nvme_path) == []


def test_list_says_of_what_it_may_not_open_that_it_may_not(
    open_engine: Open, nvme_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's snapshot is below the same path."""
    for name in ("a", "b"):
        train(open_engine(build("gpt"), named(nvme_path, name)), 0, 1).close()
    opened = os.open

    def guarded(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("/a/rank-0/swap"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", guarded)
    assert main(["snapshots", "list", str(nvme_path)]) == 0
    a, b = capsys.readouterr().out.splitlines()
    assert "Permission denied" in a and b.startswith("b: step")


@pytest.mark.parametrize("name", ["a", "..", "."])
def test_rm_of_what_is_not_there_names_what_is(
    open_engine: Open, nvme_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    train(open_engine(build("gpt"), named(nvme_path, "b")), 0, 1).close()
    assert main(["snapshots", "rm", str(nvme_path), name]) == 1
    assert f"there is no snapshot '{name}' below {nvme_path}; available: b" in capsys.readouterr().err
    assert (nvme_path / "zero-snapshots" / "b" / "committed").exists()


@pytest.mark.parametrize("words", [["list"], ["rm"]])
def test_a_folder_that_is_not_there_is_no_folder_without_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["snapshots", *words, str(tmp_path / "gone"), *["it"] * (words == ["rm"])]) == 1
    assert f"expected a folder of nvme_path, got {tmp_path / 'gone'}" in capsys.readouterr().err


def test_rm_leaves_alone_what_a_job_uses(
    open_engine: Open, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = train(open_engine(build("gpt"), named(nvme_path, "a")), 0, 1)
    assert main(["snapshots", "rm", str(nvme_path), "a"]) == 1
    assert "is in use by a job" in capsys.readouterr().err
    engine.close()
    engine = open_engine(build("gpt"), named(nvme_path, "a"))
    assert engine.load_snapshot() == 2


def test_rm_takes_along_what_is_below_other_paths(
    open_engine: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "x", tmp_path / "y"]
    for path in paths:
        path.mkdir()
    config = named(paths[0], "a")
    for block in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][block]["nvme_path"] = [str(path) for path in paths]
    train(open_engine(build("gpt"), config), 0, 1).close()
    assert main(["snapshots", "rm", str(paths[0]), "a"]) == 0
    assert [os.listdir(path) for path in paths] == [[], []]
