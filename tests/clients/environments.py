"""Environments with other versions of clients than those that are installed; each is kept for the next time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from client_process import ROOT

INSTALL_SECONDS = 1800


def python_with(name: str, pins: Sequence[str], commands: Sequence[Sequence[str]]) -> Path:
    """The interpreter of `.venv-NAME`, made by these commands of pip under these constraints; skips if it cannot be.

    The engine runs there from the source tree.
    """
    environment = ROOT / f".venv-{name}"
    python, stamp = environment / "bin" / "python", environment / ".installed"
    wanted = hashlib.sha256(repr((pins, commands)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(pins))
    for command, *words in commands:
        under = ["-c", str(constraints)] if command == "install" else ["--yes"]
        pip = [str(python), "-m", "pip", command, "--quiet", "--disable-pip-version-check", *under, *words]
        made = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        if made.returncode:
            assert "ResolutionImpossible" not in made.stderr, made.stderr  # the pins contradict each other
            pytest.skip(f"{name} cannot be had: {made.stderr.strip()[-500:]}")
    stamp.write_text(wanted)
    return python
