"""Saving and loading take a few transfer blocks, whatever the model's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, make_config

from benchmarks.cgroup import MemoryCgroup
from zero.assembly.model_plan import plan_model
from zero.config import load_config
from zero.plan.machine import read_machine

ROOT = Path(__file__).parents[3]
SIZES = {"vocab": 8192, "width": 1280, "blocks": 16, "heads": 16, "tokens": 64}
EXTRA_BYTES = 600_000_000
"""Python, torch, activations, and the blocks of a checkpoint."""


def config_of(nvme_path: Path) -> dict[str, Any]:
    """Every size is left to the plan."""
    config = make_config(("nvme", "nvme"), nvme_path, clipping=1.0)
    for key in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):
        del config["zero_optimization"][key]
    return config


def may_limit() -> bool:
    try:
        with MemoryCgroup(256 << 20, "zero-infinity-checkpoint-test"):
            return True
    except OSError:
        return False


WORKER = """
    import hashlib, json, sys
    import torch, zero
    from models import GPT, tokens

    torch.set_num_threads(2)
    config, sizes, folder, then = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.manual_seed({"save": 1, "load": 2}[then])
    with zero.Init(config_dict_or_path=config):
        model = GPT(**sizes)
    engine = zero.initialize(model=model, config=config)[0]

    def train(index):
        loss = engine(tokens(index, batch=2, length=sizes["tokens"], vocab=sizes["vocab"]))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    if then == "save":
        train(0)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    print(json.dumps({"loss": train(1), "again": train(2)}))
    engine.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not may_limit(), reason="no right to make a memory cgroup here")
def test_a_336m_model_is_saved_and_loaded_within_its_plan_and_600_mb(nvme_path: Path, tmp_path: Path) -> None:
    config = config_of(nvme_path)
    with torch.device("meta"):
        model = GPT(**SIZES)  # type: ignore[arg-type]
    assert 330_000_000 < sum(p.numel() for p in model.parameters()) < 342_000_000
    cpu = torch.device("cpu")
    _, plan = plan_model(model, load_config(config), read_machine(cpu), cpu)
    planned_bytes = sum(row.nbytes for row in plan.rows if row.tier != "nvme")
    told, given = {}, [json.dumps(config), json.dumps(SIZES), str(tmp_path / "saved")]
    for then in ("save", "load"):
        with MemoryCgroup(planned_bytes + EXTRA_BYTES, "zero-infinity-checkpoint") as group:
            done = subprocess.run(
                [*group.prefix, sys.executable, "-c", textwrap.dedent(WORKER), *given, then],
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
                capture_output=True,
                text=True,
                timeout=800,
                check=False,
            )
            print(f"{then}: plan {planned_bytes:,}, peak {group.peak_bytes}, {group.kills} kills")
            assert done.returncode == 0 and group.kills == 0, done.stderr[-3000:]
        told[then] = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["load"] == told["save"]
