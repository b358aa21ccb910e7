"""Finds the Python that has zero-infinity, for a command whose `python3` on PATH is another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates() -> Iterator[Path]:
    """Interpreters, the likeliest first: of the environment or checkout in which this file lies, then the user's."""
    here = Path(__file__).resolve()
    for parent in here.parents:
        if parent.name in ("site-packages", "dist-packages"):
            yield parent.parents[2] / "bin" / "python3"
    yield here.parents[4] / ".venv" / "bin" / "python3"
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "python3"
    yield from (Path(path) for name in ("python", "python3") if (path := shutil.which(name)))


def has_engine(python: Path) -> bool:
    words = [str(python), "-c", "import zero.compat.commands"]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/").returncode == 0


def start_again(error: ImportError) -> None:
    """Replace this process by the same command under the Python that has the engine; else exit with advice."""
    for python in candidates():
        if python.is_file() and has_engine(python):
            os.execv(str(python), [str(python), *sys.argv])
    print(
        f"{Path(sys.argv[0]).name}: expected a Python that has zero-infinity, got {sys.executable} ({error}); activate "
        f"its environment, or run /path/to/its/python {sys.argv[0]}",
        file=sys.stderr,
    )
    sys.exit(1)
