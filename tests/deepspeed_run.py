"""Make checkpoints with the real DeepSpeed, with the values that its engine held; also the program of each rank.

`make(folder, Run(...))` trains `deepspeed_sample` in separate processes. They need deepspeed; this module does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed_sample as sample
import torch
from safetensors.torch import save_file

WANTED_VERSION = "0.19.8"
EXPECTED = "expected.safetensors"
"""The engine's values, by the names of our logical form."""
EXPORTED = "zero_to_fp32.safetensors"
"""The output of DeepSpeed's own script for the folder."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a training.

    Attributes:
        zero: further keys of the JSON's zero_optimization.
        config: further keys of the JSON.
        torch_scheduler: use a scheduler of torch instead of DeepSpeed's.
        in_init: build the model inside deepspeed.zero.Init.
        accumulation: micro-batches of a step.
        zero_to_fp32: DeepSpeed's own script can read the checkpoint.
    """

    stage: int
    dtype: str = "bf16"
    ranks: int = 1
    steps: int = 3
    width: int = 6
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exclude_frozen: bool = False
    torch_scheduler: bool = False
    in_init: bool = False
    accumulation: int = 1
    client_state: bool = True
    zero_to_fp32: bool = True


def why_not() -> str | None:
    """The reason why no checkpoint can be made here; None if one can be made."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    from importlib.metadata import version

    if shutil.which("ninja", path=search_path()) is None or shutil.which("g++") is None:
        return "deepspeed compiles its operators at first use; that takes ninja and g++"
    found = version("deepspeed")
    return None if found == WANTED_VERSION else f"deepspeed {WANTED_VERSION} is wanted, {found} is installed"


def search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def make(folder: Path, run: Run) -> Path:
    """Train, and save below `folder`, with `expected.safetensors` next to the tags; returns `folder`.

    The programs that DeepSpeed copies into it are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, str(folder), json.dumps(asdict(run))]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(run.ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **shared,
                "PATH": search_path(),
                "DS_ACCELERATOR": "cpu",
                "RANK": str(k),
                "LOCAL_RANK": str(k),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(run.ranks)
    ]
    try:
        told = [process.communicate(timeout=800)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise AssertionError("\n".join(told))
    for program in folder.glob("zero_to_*.py"):
        program.unlink()
    return folder


def _config(run: Run, folder: Path) -> dict[str, Any]:
    zero = {"stage": run.stage, "reduce_bucket_size": 1000, **run.zero}
    if run.stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, **zero}
    for kind in ("offload_optimizer", "offload_param"):
        if zero.get(kind, {}).get("device") == "nvme":
            zero[kind] = {"nvme_path": str(folder / "swap"), **zero[kind]}
    optimizer = {"type": "AdamW", "params": {**sample.OPTIMIZER}}
    if "offload_optimizer" not in zero:
        optimizer["params"]["torch_adam"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": sample.CLIPPING,
        "optimizer": optimizer,
        "zero_optimization": zero,
        **run.config,
    }
    if run.dtype != "fp32":
        config.setdefault(run.dtype, {"enabled": True})
    if not run.torch_scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {**sample.SCHEDULER}}
    return config


def _initialize(run: Run, folder: Path) -> Any:
    import deepspeed  # type: ignore[import-untyped]

    config = _config(run, folder)
    if run.in_init:
        torch.manual_seed(11)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = sample.Sample(run.width)
    else:
        model = sample.build(run.width)
    more: dict[str, Any] = {}
    if run.torch_scheduler:
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    return deepspeed.initialize(model=model, model_parameters=sample.groups(model), config=config, **more)[0]


def _held(engine: Any) -> dict[str, torch.Tensor]:
    """All values of the engine, gathered, by the names of our logical form."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # type: ignore[import-untyped]

    _relink(engine)
    held = {f"model.{name}": value.clone() for name, value in engine.module.named_buffers() if name != "scratch"}
    for name, value in engine.module.named_parameters():
        if not value.requires_grad:
            held[f"model.{name}"] = _whole(value)
            continue
        held[f"model.{name}"] = safe_get_full_fp32_param(value).clone()
        for kind in MOMENTS if engine.global_steps else ():
            held[f"optim.state.{name}.{kind}"] = safe_get_full_optimizer_state(value, kind).clone()
    return held


def _relink(engine: Any) -> None:
    optimizer = engine.optimizer
    if not hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        return  # neither stage 1 nor 2
    if hasattr(optimizer, "round_robin_bit16_groups"):
        # With round-robin order, parameters were linked to the values of others.
        optimizer.bit16_groups = optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
    # All groups were linked after the first group's first step, when the others had no moments yet: link them again.
    optimizer._hp_optimizer_states_linked = False
    if engine.global_steps:
        optimizer._lazy_init_hp_params_optimizer_state()


def _whole(frozen: torch.Tensor) -> torch.Tensor:
    if not hasattr(frozen, "ds_id"):
        return frozen.detach().clone()
    frozen.all_gather()
    value = frozen.detach().clone()
    frozen.partition()
    return value


def _train(folder: Path, run: Run) -> None:
    import deepspeed  # type: ignore[import-untyped]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    engine = _initialize(run, folder)
    for step in range(run.steps * run.accumulation):
        loss = engine(sample.batch(step, rank))
        engine.backward(loss)
        engine.step()
    client_state = sample.CLIENT_STATE if run.client_state else {}
    engine.save_checkpoint(str(folder), client_state=client_state, exclude_frozen_parameters=run.exclude_frozen)
    held = _held(engine)
    if rank == 0:
        save_file(held, folder / EXPECTED)
        if run.zero_to_fp32:
            exported = get_fp32_state_dict_from_zero_checkpoint(str(folder))
            save_file({name: value.clone() for name, value in exported.items()}, folder / EXPORTED)
    torch.distributed.barrier()
    engine.destroy()
    if rank == 0:
        shutil.rmtree(folder / "swap", ignore_errors=True)


if __name__ == "__main__":
    _train(Path(sys.argv[1]), Run(**json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # without waiting for its threads
