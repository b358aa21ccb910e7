"""The scripts of docs/offload-optimizer.md run as the page says, and go on from what they have saved."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.broad

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "offload_optimizer"
PAGE = (ROOT / "docs" / "offload-optimizer.md").read_text(encoding="utf-8")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(told: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?:'loss': '|\bloss )([0-9.]+)", told)]


@pytest.mark.parametrize(
    ("name", "launcher"), [("plain_torch", ()), pytest.param("fsdp2", TORCHRUN, marks=pytest.mark.slow)]
)
def test_a_script_trains_and_goes_on_from_its_checkpoint(
    nvme_path: Path, tmp_path: Path, name: str, launcher: tuple[str, ...]
) -> None:
    assert f"scripts/offload_optimizer/{name}.py" in PAGE
    command = [*launcher, str(SCRIPTS / f"{name}.py"), "--nvme-path", str(nvme_path), "--steps", "4"]
    saved = tmp_path / "saved"
    first, second = (losses(run(*command, "--checkpoint", str(saved), cwd=tmp_path)) for _ in range(2))
    assert len(first) == len(second) == 4
    assert second[-1] < first[0]
    assert saved.exists() and os.listdir(nvme_path) == []


@pytest.mark.slow
def test_the_trainers_script_trains_and_goes_on_from_its_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    missing = [package for package in ("transformers", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    assert "scripts/offload_optimizer/trainer.py" in PAGE
    command = [str(SCRIPTS / "trainer.py"), "--nvme-path", str(nvme_path), "--output", str(tmp_path / "out")]
    first = losses(run(*command, "--steps", "5", cwd=tmp_path))
    second = losses(run(*command, "--steps", "8", cwd=tmp_path))
    assert second[-1] < first[0]
    assert (tmp_path / "out" / "checkpoint-5" / "optimizer.pt").exists()
    assert (tmp_path / "out" / "checkpoint-8").exists() and os.listdir(nvme_path) == []
