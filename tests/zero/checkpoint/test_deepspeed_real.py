"""Reading what the DeepSpeed that is installed writes here and now, compared with what it held when it wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_run import EXPECTED, EXPORTED, MOMENTS, Run, make, why_not
from safetensors.torch import load_file

from zero.checkpoint.deepspeed import is_deepspeed_folder, open_deepspeed_folder

HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
DISK: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}
BF16_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
RUNS = {
    "stage 3, cpu": Run(stage=3, zero={**HOST, "offload_param": {"device": "cpu"}}),
    "stage 3, nvme, in sub-groups": Run(
        stage=3, width=40_000, zero={**DISK, "sub_group_size": 300_000}, zero_to_fp32=False
    ),
    "stage 2, cpu, accumulation": Run(stage=2, zero=HOST, accumulation=2),
}
LONG_RUNS = {
    "stage 1": Run(stage=1, ranks=2),
    "stage 1, fp32, without frozen": Run(stage=1, ranks=3, dtype="fp32", exclude_frozen=True),
    "stage 1, elastic": Run(stage=1, ranks=2, zero={"elastic_checkpoint": True}),
    "stage 1, parameters aligned": Run(stage=1, ranks=2, zero={"parameter_alignment": True}),
    "stage 1, gradients in fp32": Run(
        stage=1, ranks=2, config={"data_types": {"grad_accum_dtype": "fp32"}}, zero_to_fp32=False
    ),
    "stage 2": Run(stage=2, ranks=2, client_state=False),
    "stage 2, round robin": Run(stage=2, ranks=2, dtype="fp32", zero={"round_robin_gradients": True}),
    "stage 2, cpu": Run(stage=2, ranks=2, zero=HOST),
    "stage 2, bf16 states": Run(stage=2, zero=HOST, config={"bf16": BF16_STATES}),
    "stage 2, before the first step": Run(stage=2, ranks=2, steps=0),
    "stage 3": Run(stage=3, ranks=2, torch_scheduler=True),
    "stage 3, fp32": Run(stage=3, ranks=2, dtype="fp32"),
    "stage 3, in sub-groups": Run(stage=3, ranks=3, zero={"sub_group_size": 20}),
    "stage 3, built sharded, without frozen": Run(
        stage=3, ranks=2, in_init=True, exclude_frozen=True, zero={"sub_group_size": 40}
    ),
    "stage 3, persistent parameters": Run(stage=3, ranks=2, zero={"stage3_param_persistence_threshold": 1000}),
    "stage 3, nvme": Run(stage=3, ranks=2, width=60_000, zero={**DISK, "sub_group_size": 500_000}, zero_to_fp32=False),
    "stage 3, before the first step": Run(stage=3, ranks=2, steps=0),
}
FROZEN = {"model.base.weight", "model.base.bias"}
missing = why_not()
pytestmark = [pytest.mark.skipif(missing is not None, reason=missing or ""), pytest.mark.timeout(900)]


def cases() -> list[Any]:
    slow = [pytest.param(run, id=name, marks=pytest.mark.slow) for name, run in LONG_RUNS.items()]
    return [*(pytest.param(run, id=name) for name, run in RUNS.items()), *slow]


@pytest.mark.parametrize("run", cases())
def test_values_are_what_deepspeed_holds(run: Run, tmp_path: Path) -> None:
    folder = make(tmp_path / "saved", run)
    tag = folder / (folder / "latest").read_text().strip()
    assert is_deepspeed_folder(tag)
    checkpoint = open_deepspeed_folder(tag)
    source = checkpoint.source
    expected = load_file(folder / EXPECTED)
    left_out = FROZEN if run.exclude_frozen else set()
    assert left_out <= expected.keys() and not left_out & source.tensors.keys()
    trained = [name for name in checkpoint.state["parameters"] if name not in checkpoint.state["frozen"]]
    for name, value in expected.items():
        if name in left_out:
            continue
        saved = source.tensors[name]
        assert (saved.shape, saved.dtype) == (value.shape, value.dtype), name
        assert torch.equal(source.read(name, 0, value.numel()).view(value.shape), value), name
    for name in trained:
        assert source.read(f"optim.state.{name}.step", 0, 1).item() == run.steps
        if not run.steps:
            assert not any(source.read(f"optim.state.{name}.{kind}", 0, 1).any() for kind in MOMENTS)
    if run.zero_to_fp32:
        for name, value in load_file(folder / EXPORTED).items():
            found = source.read(f"model.{name}", 0, value.numel()).view(value.shape)
            assert torch.equal(found.to(value.dtype), value), name
    state = checkpoint.state
    assert (state["global_steps"], state["micro_steps"]) == (run.steps, run.steps * run.accumulation)
    assert {name for group in state["groups"] for name in group["params"]} == set(trained)
    assert set(checkpoint.client(False)["client_state"]) == (
        {"epoch", "best", "seen", "generator"} if run.client_state else set()
    )
    assert checkpoint.client(False)["lr_scheduler"]
