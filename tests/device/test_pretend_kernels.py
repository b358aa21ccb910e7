"""The CUDA kernels and streams, on the pretend GPU: the tests that are written for a real one pass there."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretend_process import SHOWN_CHARACTERS, TESTS, finished, needed

pytestmark = pytest.mark.broad

KERNELS = TESTS / "offload" / "test_kernels_cuda.py"
STREAMS = TESTS / "offload" / "test_streams_cuda.py"
TRAINING = TESTS / "zero" / "test_cuda.py"
KNOWN = "test_a_closed_engine_leaves_no_device_memory"
"""See test_pretend_memory.py."""


def passes(paths: tuple[Path, ...], mode: str, *options: str) -> None:
    needed()
    command = ("-m", "pytest", "-q", "-p", "pretend", "-p", "no:cacheprovider", *map(str, paths), *options)
    run = finished(*command, PRETEND_MODE=mode)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-SHOWN_CHARACTERS:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


def test_what_is_written_for_a_gpu_passes_on_the_pretend_one() -> None:
    passes((KERNELS, STREAMS), "late")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["copies", "compute", "random"])
def test_training_that_is_written_for_a_gpu_passes_on_the_pretend_one(mode: str) -> None:
    passes((TRAINING,), mode, "--deselect", f"{TRAINING.relative_to(TESTS.parent)}::{KNOWN}")
