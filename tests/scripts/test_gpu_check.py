"""scripts/gpu_check and the GPU questions on a machine without a GPU: they say so, and run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_step
from benchmarks.gpu import SHAPES, quick_initialisation
from benchmarks.models import GPT

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def test_gpu_check_without_cuda_says_so_and_exits_2() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "gpu_check")], env=HIDDEN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA here" in done.stderr


@pytest.mark.parametrize("question", ["gpu_copy", "gpu_adam", "gpu_step"])
def test_a_gpu_question_without_a_gpu_says_so_and_exits_2(question: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{question}", "--json", str(tmp_path / "answer.json")]
    done = subprocess.run(command, env=HIDDEN, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU" in done.stderr
    assert not (tmp_path / "answer.json").exists()


@pytest.mark.parametrize(
    ("contestant", "module"),
    [
        *[("ours", "benchmarks.gpu_worker"), ("plain", "benchmarks.rivals.fsdp2")],
        pytest.param("plain", "benchmarks.gpu_worker", marks=pytest.mark.slow),
        pytest.param("ours", "benchmarks.rivals.fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_contestant_trains_a_tiny_model_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, contestant: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = SHAPES["tiny"]
    spec: dict[str, Any] = {
        "shape": {name: getattr(shape, name) for name in ("layers", "width", "vocabulary", "sequence", "batch")},
        "contestant": contestant,
        "dtype": "float32",
        "warmup": 1,
        "steps": 2,
        "config": gpu_step.our_config("nvme", tmp_path, shape, 10**9, None),
        "path": str(tmp_path),
    }
    found = gpu_step.run(gpu_step.Contestant(contestant, module, spec, 1.0), 120)
    assert "why" not in found, found
    assert len(found["step_seconds"]) == 2 and found["ready_seconds"] is not None


def test_a_contestant_that_is_stopped_counts_with_the_steps_it_has_done() -> None:
    said = "\n".join(json.dumps({"event": "step", "number": n, "seconds": 1.5}) for n in range(2))
    found = gpu_step.summarize(f"chatter\n{said}\n", "first\nlast words", "not done after 3 s")
    assert found["step_seconds"] == [1.5, 1.5] and found["why"] == "not done after 3 s: first | last words"


def test_the_model_in_question_has_seven_billion_parameters() -> None:
    assert SHAPES["7B"].numel >= 7_000_000_000


def test_quick_initial_values_are_finite_and_not_all_equal() -> None:
    with quick_initialisation():
        model = GPT(SHAPES["tiny"])
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name
    assert float(model.head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
