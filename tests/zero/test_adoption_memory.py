"""Moving a model from memory into planes in memory takes hardly more than the planes themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch, zero
from torch import nn
from benchmarks.loop import peak_rss_bytes
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
}
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
numel = sum(parameter.numel() for parameter in model.parameters())
before = peak_rss_bytes()
engine = zero.initialize(model=model, config=config)[0]
print(numel, peak_rss_bytes() - before, engine.plan.tier_bytes("host"))
engine.close()
"""


@pytest.mark.broad
def test_initial_values_leave_their_memory_while_the_planes_fill() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=ROOT)
    if told.returncode:
        pytest.fail(told.stderr)
    numel, grown_bytes, planned_bytes = (int(word) for word in told.stdout.split())
    # Weight and remainder take what the fp32 source gives back; the moments, 8 of at least 14 bytes, are not there yet.
    assert planned_bytes >= 14 * numel
    assert grown_bytes < planned_bytes // 2
