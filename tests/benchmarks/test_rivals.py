"""Rivals that are absent or fail are missing with a reason; their answers are understood."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from benchmarks.common import RivalMissing
from benchmarks.rivals import deepspeed_setup, fio


def job(read: tuple[int, int], write: tuple[int, int]) -> str:
    (read_ms, read_bytes), (write_ms, write_bytes) = read, write
    jobs = [
        {
            "read": {"runtime": read_ms, "io_bytes": read_bytes},
            "write": {"runtime": write_ms, "io_bytes": write_bytes},
        }
    ]
    return "fio: a note on the first line\n" + json.dumps({"jobs": jobs})


@pytest.mark.parametrize(
    ("read", "write", "seconds"),
    [((500, 1024), (0, 0), 0.5), ((0, 0), (250, 1024), 0.25), ((500, 512), (400, 512), 0.5)],
)
def test_fio_took_as_long_as_the_longer_of_reads_and_writes(
    read: tuple[int, int], write: tuple[int, int], seconds: float
) -> None:
    assert fio.parse(job(read, write)) == {"seconds": seconds, "read_bytes": read[1], "write_bytes": write[1]}


def test_fio_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert fio.version() is None
    with pytest.raises(RivalMissing, match="not installed"):
        fio.run("read", "file", 4096, 4096, 1)


def test_fio_that_fails_is_missing_and_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tool = tmp_path / "fio"
    tool.write_text("#!/bin/sh\necho 'no such file' >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RivalMissing, match="status 3: no such file"):
        fio.run("read", "file", 4096, 4096, 1)


def test_deepspeed_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RivalMissing, match="not installed"):
        deepspeed_setup.require("async_io")


def test_another_version_of_deepspeed_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(deepspeed_setup, "version", lambda name: "0.18.0")
    with pytest.raises(RivalMissing, match=r"expected version 0\.19\.8, found 0\.18\.0"):
        deepspeed_setup.require()
