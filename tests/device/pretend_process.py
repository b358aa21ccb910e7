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

Cell = tuple[str, str]
"""A scenario at a place, "plain:cpu-nvme", and a mode of the device."""


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


def verdicts(wanted: list[str], modes: tuple[str, ...], tree: Path = TESTS.parent) -> dict[Cell, str]:
    """What each scenario says in each mode: "same", or what is wrong. A process that dies is a verdict too."""
    run = finished(str(HERE / "pretend_run.py"), ",".join(modes), *wanted, tree=tree)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    found = {(each, mode): said for each, mode, said in lines}
    for cell in ((each, mode) for each in wanted for mode in modes):
        if cell not in found:
            found[cell] = f"the process ended ({run.returncode}) in or before it:\n{run.stderr[-SHOWN_CHARACTERS:]}"
            break
    return found


def wrong(found: dict[Cell, str]) -> str:
    """A line for everything that is not as on the CPU."""
    return "\n".join(f"{each} in mode {mode}: {said}" for (each, mode), said in found.items() if said != "same")
