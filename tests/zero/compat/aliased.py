"""Children whose `import deepspeed` finds the alias."""

from __future__ import annotations

import json
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


FORKS = """
import json, os, sys, tempfile, traceback
import torch
for line in sys.stdin:
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            status = 1
            try:
                exec(compile(json.loads(line), "<code>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        print(json.dumps([status, printed.read().decode()]), flush=True)
"""
"""A process that has imported torch, and neither the alias nor us, forks for each piece of code on its stdin."""


class Forks:
    """Runs pieces of code, each where only torch has been imported, without the time that its import takes."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment(**OPTED_IN), text=True, stdin=pipe, stdout=pipe)

    def said(self, text: str) -> str:
        """What the code prints; it has to succeed."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        asked.write(json.dumps(textwrap.dedent(text)) + "\n")
        asked.flush()
        status, printed = json.loads(answers.readline())
        assert status == 0, printed
        return str(printed).strip()

    def close(self) -> None:
        self._process.communicate(timeout=60)


def code(text: str) -> tuple[str, str]:
    """Arguments that run a piece of code."""
    return "-c", textwrap.dedent(text)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A file with that code."""
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path
