"""The other client tests once more, on a generation of the libraries before the one that is installed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from client_process import ROOT

pytestmark = pytest.mark.slow

OLDER = {
    "transformers": "4.57.6",
    "accelerate": "1.11.0",
    "trl": "0.24.0",
    "peft": "0.18.1",
    **{"datasets": "5.0.1", "fsspec": "2026.6.0", "huggingface_hub": "0.36.2", "tokenizers": "0.22.2"},
}
"""The rest is as constraints.txt says."""
ENVIRONMENT = ROOT / ".venv-older"
"""Kept for the next time."""
INSTALL_SECONDS, RUN_SECONDS = 1800, 5400


@pytest.fixture(scope="module")
def older_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the older versions."""
    shared = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in shared if line.partition("==")[0] not in OLDER]
    pins += [f"{name}=={version}" for name, version in OLDER.items()]
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    wanted = hashlib.sha256("\n".join([*pins, (ROOT / "pyproject.toml").read_text()]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    constraints = tmp_path_factory.mktemp("older") / "constraints.txt"
    constraints.write_text("\n".join(pins))
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    made = subprocess.run(
        [*map(str, install), "-e", f"{ROOT}[test]"], capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    if made.returncode:
        assert "ResolutionImpossible" not in made.stderr, made.stderr  # the pins contradict each other
        pytest.skip(f"the older clients cannot be had: {made.stderr.strip()[-500:]}")
    stamp.write_text(wanted)
    return python


@pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
def test_the_client_tests_pass_on_the_generation_before(older_python: Path) -> None:
    command = [str(older_python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "tests/clients"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    _, _, failures = done.stdout.rpartition("short test summary info")
    assert done.returncode == 0, f"{failures[-8000:]}{done.stderr[-2000:]}"
    assert re.search(r"\d+ passed", done.stdout), done.stdout
