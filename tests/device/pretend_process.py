"""Processes in which torch sees the pretend GPU; started by tests, which skip where there can be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pretend_build
import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
TIMEOUT_SECONDS = 280
SHOWN_CHARACTERS = 6_000


def needed() -> None:
    """Skip where the device cannot be built; build it if nobody has.

    Raises:
        RuntimeError: the compiler failed.
    """
    reason = pretend_build.unavailable()
    if reason is not None:
        pytest.skip(reason)
    pretend_build.built()


def finished(*command: str, tree: Path = TESTS.parent, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with `command`, run to its end; the product is that of `tree`."""
    path = os.pathsep.join(map(str, (tree, TESTS, HERE)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PRETEND_TREE": str(tree), **variables}
    python = [sys.executable, "-X", "faulthandler"]
    return subprocess.run(
        [*python, *command], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=tree, env=environment
    )


def verdicts(cells: list[str], tree: Path = TESTS.parent) -> dict[str, str]:
    """What each scenario says at its place and in each of its modes: "same", or what is wrong.

    A process that dies is a verdict too: on the first cell that it did not come to.
    """
    run = finished(str(HERE / "pretend_run.py"), *cells, tree=tree)
    found: dict[str, str] = dict(json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))
    for each in cells:
        name, pair, modes = each.split(":")
        for cell in (f"{name}:{pair}:{mode}" for mode in modes.split(",")):
            if cell not in found:
                found[cell] = f"the process ended ({run.returncode}) in it:\n{run.stderr[-SHOWN_CHARACTERS:]}"
                return found
    return found


def wrong(found: dict[str, str]) -> str:
    """A line for everything that is not as on the CPU."""
    return "\n".join(f"{cell}: {said}" for cell, said in found.items() if said != "same")
