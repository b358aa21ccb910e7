"""The striping question runs to its end where disks can be throttled, says why where they cannot, and cleans up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import striping


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "answer.json"
    monkeypatch.setattr("sys.argv", ["striping", "--json", str(file), "--path", str(folder), *arguments])
    striping.main()
    found = dict(json.loads(file.read_text()))
    file.unlink()
    return found


@pytest.mark.slow
def test_both_kinds_of_traffic_are_compared_and_nothing_stays_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = ["--rounds", "2", "--seconds", "0.2", "--record-bytes", str(1 << 20)]
    content = answer(monkeypatch, tmp_path, *small, "--bytes-per-second", "30000000", "60000000")
    if content["missing"]:
        pytest.skip(content["missing"]["throttled disks"])
    marks = {mark["what"] for mark in content["marks"]}
    assert marks == {f"{kind}: both / (slow alone + fast alone)" for kind in ("write", "read")}
    slow, fast = content["figures"]["stripes of a round, slow and fast"]
    assert slow < fast
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_without_privileges_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    content = answer(monkeypatch, tmp_path)
    assert "root" in content["missing"]["throttled disks"] and content["marks"] == []
    assert list(tmp_path.iterdir()) == []
