"""Children whose `import deepspeed` finds the alias."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import zero.compat.deepspeed as compat

ROOT = Path(compat.__file__).resolve().parents[3]
OPTED_IN = {"PYTHONPATH": os.pathsep.join([compat.ALIAS, str(ROOT)])}


def environment(**more: str) -> dict[str, str]:
    """Of a child on the CPU that no launcher has started, and that knows no alias unless it is told."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    quiet = {"ZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return kept | quiet | more


def python(*words: str, env: Mapping[str, str] = OPTED_IN, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    return subprocess.run(
        [sys.executable, *words], env=environment(**env), cwd=cwd, capture_output=True, text=True, timeout=240
    )


def said(*words: str, env: Mapping[str, str] = OPTED_IN, cwd: Path | None = None) -> str:
    """What it prints; it has to succeed."""
    done = python(*words, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def code(text: str) -> tuple[str, str]:
    """Arguments that run a piece of code."""
    return "-c", textwrap.dedent(text)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A file with that code."""
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path
