"""The kernel benchmarks run, and the stored run that they are compared with has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kept import RESULTS
from benchmarks.test_kernels import KERNELS

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.test_kernels", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_takes_the_arguments_of_its_benchmark(name: str) -> None:
    kernel, *arguments = KERNELS[name]()
    kernel(*arguments)


def test_a_run_is_compared_with_the_stored_one(tmp_path: Path) -> None:
    few = ("-k", "scalar and crc32c", "--benchmark-min-rounds=1", "--benchmark-max-time=0.001")
    run(*few, f"--benchmark-storage={tmp_path.as_uri()}", "--benchmark-save=before")
    (stored,) = tmp_path.rglob("*.json")
    assert "node" not in json.loads(stored.read_text())["machine_info"]
    text = run(*few, f"--benchmark-storage={tmp_path.as_uri()}")
    assert "crc32c] (NOW)" in text and "crc32c] (0001_before)" in text


def test_the_stored_run_has_every_kernel() -> None:
    newest = max(RESULTS.glob("*/*_kernels.json"))
    names = {entry["group"] for entry in json.loads(newest.read_text())["benchmarks"]}
    assert names == {*KERNELS, "copy of fp32"}
