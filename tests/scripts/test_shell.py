"""The shell scripts: parsed by bash, and clear about what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    "scripts/environment.sh",
    "scripts/quickstart",
    "scripts/test",
    "scripts/gpu_check",
    "scripts/wheel",
    ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_accepts_the_script(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_program_can_be_started(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a fresh clone that the set-up looks at."""
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    return tmp_path / "clone"


def stand_in(path: Path, version: tuple[int, int], modules: str) -> Path:
    """An executable that answers as a Python of that version would, with or without the modules."""
    too_old = int(version < (3, 10))
    path.write_text(
        "#!/bin/bash\n"
        f'if [[ "$1" == -V ]]; then echo "Python {version[0]}.{version[1]}.0"; exit 0; fi\n'
        f'if [[ "$2" == *version_info* ]]; then exit {too_old}; fi\n'
        f'if [[ "$2" == *ensurepip* ]]; then {modules}; fi\n'
        "exit 99\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "modules", "message"),
    [
        ((3, 9), "exit 0", "is Python 3.9.0, needs Python 3.10 or newer"),
        ((3, 12), "exit 1", "has no venv module"),
    ],
)
def test_an_unfit_python_is_refused_before_anything_is_made(
    checkout: Path, tmp_path: Path, version: tuple[int, int], modules: str, message: str
) -> None:
    python = stand_in(tmp_path / "python", version, modules)
    done = subprocess.run(
        [str(checkout / "scripts" / "quickstart")],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert not (checkout / ".venv").exists()
