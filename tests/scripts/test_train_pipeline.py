"""The example of a pipeline learns, and goes on from its checkpoint with another number of stages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.broad

ROOT = Path(__file__).resolve().parents[2]


def losses(ranks: int, folder: Path, nvme_path: Path) -> list[float]:
    """The losses that a run of four steps prints."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for index in range(25):
        (text / f"{index:02}.txt").write_text(f"line {index} of some text\n" * 40)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(ROOT / "scripts" / "train_pipeline.py"), "--stages", str(ranks), "--layers", "2", "--width", "64"),
        *("--sequence", "16", "--micro-batches", "2", "--steps", "4", "--corpus", str(text)),
        *("--checkpoint", str(folder / "saved"), "--offload-to", str(nvme_path)),
    ]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", done.stdout)]


def test_the_example_learns_and_goes_on_with_one_stage_from_what_two_have_saved(
    nvme_path: Path, tmp_path: Path
) -> None:
    first, second = losses(2, tmp_path, nvme_path), losses(1, tmp_path, nvme_path)
    assert len(first) == len(second) == 4
    assert second[0] < first[0] and second[-1] < first[-1]
    assert os.listdir(nvme_path) == []
