"""The guard runs each commit's own code, and calls slower only what is so beyond doubt."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guard
from benchmarks.common import Report

WORKER = """
import json, sys, zero
block = json.loads(sys.argv[1])["config"]["zero_optimization"]
print(json.dumps({"seconds": 1.0, "zero": zero.__file__, "tier": block["offload_param"]["device"]}))
"""


def test_a_commit_runs_the_code_of_its_own_folder(tmp_path: Path) -> None:
    for package, name, text in (("zero", "__init__", ""), ("benchmarks", "train_worker", WORKER)):
        (tmp_path / package).mkdir()
        (tmp_path / package / f"{name}.py").write_text(text, encoding="utf-8")
    figures: Any = guard.Contestant(tmp_path, tmp_path).step("cpu")()
    assert figures == {"seconds": 1.0, "zero": str(tmp_path / "zero" / "__init__.py"), "tier": "cpu"}


@pytest.mark.parametrize("new", [None, "HEAD"])
def test_two_commits_are_checked_out_beside_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new: str | None
) -> None:
    root = tmp_path / "project"
    (root / "native").mkdir(parents=True)
    (root / "native" / "build.py").write_text("", encoding="utf-8")
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("old", "new"):
        (root / "code").write_text(text, encoding="utf-8")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
    asked: list[str] = []

    def contestant(place: Path, disk: Path) -> Path:
        asked.append((place / "code").read_text(encoding="utf-8"))
        return place

    monkeypatch.setattr(guard, "ROOT", root)
    monkeypatch.setattr(guard, "Contestant", contestant)
    monkeypatch.setattr(guard, "ask", lambda report, options, old, new: [])
    monkeypatch.setattr(Report, "finish", lambda report: None)
    assert guard.compare(argparse.Namespace(old="HEAD~1", new=new, path=tmp_path, json=None))
    assert asked == ["old", "new"]
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


@pytest.mark.parametrize(
    ("seconds", "slower"),
    [([1.2, 1.3, 1.25, 1.2, 1.3], ["host memory"]), ([1.2, 0.9, 1.1, 0.95, 1.3], []), ([0.5] * 5, [])],
)
def test_slower_is_what_is_so_in_the_whole_interval(seconds: list[float], slower: list[str]) -> None:
    class Fake:
        def __init__(self, times: list[float]) -> None:
            self._times = iter(times)

        def step(self, tier: str) -> Any:
            return lambda: {"seconds": next(self._times)}

    options = argparse.Namespace(only=["host memory"], rounds=5, path=Path("."), json=None)
    report = Report("guard", None, options)
    old: Any = Fake([1.0] * 5)
    new: Any = Fake(seconds)
    assert guard.ask(report, options, old, new) == slower
