"""The clients' scripts that the documentation shows: with this library they reach what they reach without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_cases import SCRIPTS, loss_in

STEPS = ("--steps", "6")
PLACES = [pytest.param("2", "cpu", marks=pytest.mark.slow), ("3", "nvme")]


@pytest.mark.broad
@pytest.mark.parametrize("script", ("trainer.py", "accelerate_loop.py"))
@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_a_script_reaches_the_loss_of_the_plain_one(
    clients: Any, tmp_path: Path, nvme_path: Path, script: str, stage: str, device: str
) -> None:
    words = ("--stage", stage, "--device", device, "--nvme-path", str(nvme_path), "--output", str(tmp_path / "model"))
    ours = clients.run("script_cases:run", script, *STEPS, *words)
    theirs = clients.run("script_cases:run", script, *STEPS, "--plain")
    assert loss_in(ours) == pytest.approx(loss_in(theirs), abs=2e-6)  # six decimals are printed
    assert (tmp_path / "model" / "model.safetensors").is_file()


def launch(*words: str) -> float:
    """Run accelerate's launcher; the loss that was printed."""
    from zero.compat.deepspeed import ALIAS

    root = SCRIPTS.parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([ALIAS, str(root)])
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    return loss_in(ended.stdout)


def test_accelerate_launch_of_two_ranks_by_a_yaml_file(clients: Any, tmp_path: Path, nvme_path: Path) -> None:
    """Two ranks with two micro-batches a step are one plain rank with four."""
    yaml = pytest.importorskip("yaml")
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False},
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": 0,
    }
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(accelerate))
    script = str(SCRIPTS / "accelerate_loop.py")
    ours = launch("--config_file", str(tmp_path / "accelerate.yaml"), script, *STEPS)
    theirs = clients.run("script_cases:run", "accelerate_loop.py", *STEPS, "--plain", "--accumulation", "4")
    assert ours == pytest.approx(loss_in(theirs), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ("1", "2", "3"))
def test_accelerate_launch_by_flags(clients: Any, stage: str) -> None:
    offloaded = ["--offload_optimizer_device", "cpu"]
    if stage == "3":
        offloaded += ["--offload_param_device", "cpu", "--zero3_save_16bit_model", "true"]
    batch = ["--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0"]
    other = ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1", "--num_processes", "1"]
    words = ["--use_deepspeed", "--zero_stage", stage, *offloaded, *batch, *other, "--main_process_port", "0"]
    ours = launch(*words, str(SCRIPTS / "accelerate_loop.py"), *STEPS)
    theirs = clients.run("script_cases:run", "accelerate_loop.py", *STEPS, "--plain")
    assert ours == pytest.approx(loss_in(theirs), abs=2e-6)
