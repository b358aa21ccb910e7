"""Start ranks from a test: scripts that report into files, and a check that a run leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from zero.launch.job import Job, Node
from zero.launch.node import run_node

MARK = "LAUNCH_TEST"
"""Environment variable that all processes of a test's run inherit."""


def local_job(words: tuple[str, ...], ranks: int, **more: Any) -> Job:
    return Job((Node("localhost", tuple(range(ranks))),), words, **more)


def write_script(folder: Path, body: str, name: str = "script.py") -> str:
    """Write a script; its function `report(**facts)` writes a rank's facts into the folder."""
    head = f"""
        import json, os, signal, sys, time
        def report(**facts):
            path = {str(folder)!r} + "/report-" + os.environ["RANK"] + ".json"
            with open(path + ".part", "w") as file:
                json.dump(facts, file)
            os.rename(path + ".part", path)
    """
    path = folder / name
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return str(path)


def reports(folder: Path) -> list[Any]:
    """The reports of the ranks, in rank order."""
    paths = sorted(folder.glob("report-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [json.loads(path.read_text()) for path in paths]


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Inside, temporary files are made below `folder`; at the end neither files nor processes may be left."""
    place, mark = folder / "temporary", f"{os.getpid()}-{folder}"
    place.mkdir()
    before = dict(os.environ)
    os.environ.update({"TMPDIR": str(place), MARK: mark})
    tempfile.tempdir = None
    try:
        yield
        assert marked(mark) == []
        assert [path.name for path in place.iterdir() if not path.name.startswith("torchinductor")] == []
    finally:
        for process in marked(mark):
            process.kill()
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


def marked(mark: str) -> list[psutil.Process]:
    """Running processes with the mark, except this one; zombies have ended and do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_into(folder: str, environment: dict[str, str], job: Job, node_rank: int) -> tuple[int, str]:
    """`run_node`, called in a separate process; returns (exit status, output of the node and its ranks)."""
    path = Path(folder) / f"node-{node_rank}.txt"
    before, kept, streams = dict(os.environ), [os.dup(1), os.dup(2)], (sys.stdout, sys.stderr)
    os.environ.update(environment)
    tempfile.tempdir = None
    with path.open("w") as file:
        sys.stdout = sys.stderr = file
        for target in (1, 2):
            os.dup2(file.fileno(), target)
        try:
            status = run_node(job, node_rank)
        finally:
            sys.stdout, sys.stderr = streams
            for target, old in zip((1, 2), kept, strict=True):
                os.dup2(old, target)
                os.close(old)
            os.environ.clear()
            os.environ.update(before)
    return status, path.read_text()
