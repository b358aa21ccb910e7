"""Processes in which torch sees the pretend GPU; started by tests, which skip where there can be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pretend_build
import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
TIMEOUT_SECONDS = 280
SCENARIOS_TIMEOUT_SECONDS = 1500
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


def started(*command: str, tree: Path = TESTS.parent, **variables: str) -> subprocess.Popen[str]:
    """Python with `command`; the product is that of `tree`."""
    path = os.pathsep.join(map(str, (tree, TESTS, HERE)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PRETEND_TREE": str(tree), **variables}
    python = [sys.executable, "-X", "faulthandler"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*python, *command], stdout=pipe, stderr=pipe, text=True, cwd=tree, env=environment)


def ended(process: subprocess.Popen[str], seconds: float = TIMEOUT_SECONDS) -> subprocess.CompletedProcess[str]:
    """The process at its end; one that takes too long is killed."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def finished(*command: str, tree: Path = TESTS.parent, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with `command`, run to its end; the product is that of `tree`."""
    return ended(started(*command, tree=tree, **variables))


def verdicts(cells: list[str], tree: Path = TESTS.parent, *, swaps: bool = True) -> dict[str, str]:
    """What each scenario says at its place and in each of its modes: "same", or what is wrong.

    A process that dies is a verdict too: on the first cell that it did not come to. `swaps`: torch can swap the memory
    of storages.
    """
    variables = {"PRETEND_SWAPS": "yes" if swaps else "no"}
    run = ended(started(str(HERE / "pretend_run.py"), *cells, tree=tree, **variables), SCENARIOS_TIMEOUT_SECONDS)
    return _said(cells, run)


def verdicts_of_ranks(cells: list[str], way: str, tree: Path = TESTS.parent, ranks: int = 2) -> dict[str, str]:
    """As `verdicts`, of several ranks with a device each; a cell is as on the CPU if it is so on all of them.

    Args:
        cells: as there.
        way: in which the ranks have collectives, see pretend_ranks.py.
        tree: where the product is.
        ranks: how many.
    """
    found = dict.fromkeys(all_of(cells), "same")
    with tempfile.TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": str(ranks), "PRETEND_FOLDER": folder, "PRETEND_WAY": way, "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            started(str(HERE / "pretend_run.py"), *cells, tree=tree, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(ranks)
        ]
        for rank, process in enumerate(processes):
            for cell, said in _said(cells, ended(process, SCENARIOS_TIMEOUT_SECONDS)).items():
                if said != "same":
                    found[cell] = f"{found[cell] if found[cell] != 'same' else ''} rank {rank}: {said}"
    return found


def all_of(cells: list[str]) -> list[str]:
    """Each scenario at its place in each of its modes."""
    split = [each.split(":") for each in cells]
    return [f"{name}:{pair}:{mode}" for name, pair, modes in split for mode in modes.split(",")]


def _said(cells: list[str], run: subprocess.CompletedProcess[str]) -> dict[str, str]:
    found: dict[str, str] = dict(json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))
    for cell in all_of(cells):
        if cell not in found:
            found[cell] = f"the process ended ({run.returncode}) in it:\n{run.stderr[-SHOWN_CHARACTERS:]}"
            return found
    return found


def wrong(found: dict[str, str]) -> str:
    """A line for everything that is not as on the CPU."""
    return "\n".join(f"{cell}: {said}" for cell, said in found.items() if said != "same")
