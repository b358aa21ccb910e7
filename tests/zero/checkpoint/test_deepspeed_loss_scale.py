"""DeepSpeed's loss scaler: what it saved goes on in ours, and what it does step by step is what ours does."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from random import Random
from typing import Any

import deepspeed_sample as sample
import pytest
import torch
from deepspeed_craft import SAMPLES, change, copy_of, model_file, optim_file
from deepspeed_run import why_not
from models import make_config
from safetensors.torch import load_file

import zero
from zero.optim.loss_scale import LossScaler

SAVED = {"cur_scale": 4096.0, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1}
WINDOWS, SHIFTS, POWERS = (1, 2, 3, 5), (1, 2, 3), (2, 8, 16)
ORACLE = """
import json, sys
import deepspeed.runtime.fp16.loss_scaler as module
module.dist.get_rank = lambda: 1  # the first rank logs
told = []
for keys, overflows in json.load(sys.stdin):
    scaler, scales = module.DynamicLossScaler(**keys), []
    try:
        for overflow in overflows:
            scaler.update_scale(overflow)
            scales.append(scaler.cur_scale)
    except Exception as error:
        scales.append(str(error))
    told.append(scales)
print("\\n" + json.dumps(told))
"""


def craft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sample as an fp16 run would have saved it, with the object that DeepSpeed pickles."""
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    scaler_class = type("DynamicLossScaler", (), {"__module__": module.__name__})
    module.DynamicLossScaler = scaler_class  # type: ignore[attr-defined]
    scaler = scaler_class()
    scaler.__dict__.update(SAVED, dtype=torch.float16, dynamic=True, scale_window=1000)
    tag = copy_of("stage2", tmp_path)
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    for rank in (0, 1):
        change(optim_file(tag, rank), lambda contents: contents["optimizer_state_dict"].update(loss_scaler=scaler))
    monkeypatch.undo()

    def halve(contents: dict[str, Any]) -> None:
        module = contents["module"]
        module.update({name: value.half() for name, value in module.items() if value.is_floating_point()})
        contents["skipped_steps"] = 2

    change(model_file(tag), halve)
    return tag.parent


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
def test_an_fp16_run_of_deepspeed_goes_on_with_its_masters_and_its_scale(
    tmp_path: Path, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    folder = craft(tmp_path, monkeypatch)
    monkeypatch.setenv("ZERO_DEVICE", "cpu")
    config = make_config(*(pair, nvme_path), bf16=False, optimizer={"type": "AdamW", "params": dict(sample.OPTIMIZER)})
    config["fp16"] = {"enabled": True}
    model = sample.build()
    with zero.initialize(model=model, model_parameters=sample.groups(model), config=config)[0] as engine:
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert engine.scaler.state_dict() == {"dynamic": True, **SAVED}
        assert engine.skipped_steps == 2
        held = load_file(SAMPLES / "stage2" / "expected.safetensors")
        trained = [key.removeprefix("model.") for key in held if f"optim.state.{key[6:]}.exp_avg" in held]
        assert trained
        for name in trained:
            assert torch.equal(engine.full_master(name), held[f"model.{name}"])
            assert torch.equal(engine.full_parameter(name), held[f"model.{name}"].half())


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_step_by_step_it_is_what_the_installed_deepspeed_does() -> None:
    random, cases = Random(0), []
    for _ in range(300):
        keys = {
            "init_scale": 2.0 ** random.choice(POWERS),
            "scale_window": random.choice(WINDOWS),
            "min_scale": random.choice((1, 2)),
            "delayed_shift": random.choice(SHIFTS),
            "consecutive_hysteresis": random.choice((True, False)),
        }
        share = random.random()
        cases.append((keys, [random.random() < share for _ in range(40)]))
    done = subprocess.run(
        [sys.executable, "-c", ORACLE], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for (keys, overflows), told in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        ours = LossScaler(
            keys["init_scale"],
            dynamic=True,
            scale_window=keys["scale_window"],
            delayed_shift=keys["delayed_shift"],
            consecutive_hysteresis=keys["consecutive_hysteresis"],
            min_scale=keys["min_scale"],
            cur_hysteresis=keys["delayed_shift"],
        )
        for overflow, theirs in zip(overflows, told, strict=False):
            if overflow and ours.is_at_minimum:
                assert "already at minimum" in theirs
                break
            ours.update_scale(overflow=overflow)
            assert ours.cur_scale == theirs
