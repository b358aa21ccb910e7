"""The other client tests once more, on a generation of the libraries before the one that is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from client_process import ROOT
from environments import INSTALL_SECONDS, python_with

pytestmark = pytest.mark.slow

OLDER = {
    "transformers": "4.57.6",
    "accelerate": "1.11.0",
    "trl": "0.24.0",
    "peft": "0.18.1",
    **{"datasets": "5.0.1", "fsspec": "2026.6.0", "huggingface_hub": "0.36.2", "tokenizers": "0.22.2"},
}
"""The rest is as constraints.txt says."""
RUN_SECONDS = 5400


@pytest.fixture(scope="module")
def older_python() -> Path:
    """The interpreter of an environment with the older versions."""
    shared = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in shared if line.partition("==")[0] not in OLDER]
    pins += [f"{name}=={version}" for name, version in OLDER.items()]
    return python_with("older", pins, [("install", "-e", f"{ROOT}[test]")])


@pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
def test_the_client_tests_pass_on_the_generation_before(older_python: Path) -> None:
    command = [str(older_python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "tests/clients"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    _, _, failures = done.stdout.rpartition("short test summary info")
    assert done.returncode == 0, f"{failures[-8000:]}{done.stderr[-2000:]}"
    assert re.search(r"\d+ passed", done.stdout), done.stdout
