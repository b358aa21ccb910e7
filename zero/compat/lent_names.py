"""What clients look for on DeepSpeed's engine, and nobody needs here: put on ours by `initialize`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from zero.compat.to_fp32 import TOOLS
from zero.compat.unavailable import TIMERS, WRITERS, missing_function, refused


class EpochTimer:
    """DeepSpeed's `engine.tput_timer`: it counts epochs, as scripts tell it; `engine.statistics()` has the times."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """One more."""
        self.epoch_count += 1

    def start(self) -> None:
        """Accepted."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Accepted."""


def lend_names(engine: Any, client_optimizer: Any = None) -> None:
    """Give an engine those names.

    Args:
        engine: a new one.
        client_optimizer: what `initialize` was given as `optimizer`.
    """

    def given(block: str, key: str) -> Any:
        return (engine.config.get(block) or {}).get(key)

    writer = {name: missing_function(f"checkpoint_engine.{name}", WRITERS) for name in ("save", "load", "commit")}
    names = {
        "_get_optimizer_ckpt_name": _optimizer_file,
        "allreduce_gradients": _nothing_to_reduce,
        "basic_optimizer": engine.updater,
        "checkpoint_engine": SimpleNamespace(**writer),
        "checkpoint_tools": TOOLS,
        "client_optimizer": client_optimizer,
        "clip_fp32_gradients": missing_function(
            "DeepSpeedEngine.clip_fp32_gradients", "step() clips, to gradient_clipping of the configuration"
        ),
        "data_parallel_group": dist.group.WORLD,
        "has_moe_layers": False,
        "hooks_for_optimizer": True,
        "mpu": None,
        "optimizer_params": lambda: given("optimizer", "params"),
        "param_names": {parameter: name for name, parameter in engine.module.named_parameters()},
        "scheduler_name": lambda: given("scheduler", "type"),
        "scheduler_params": lambda: given("scheduler", "params"),
        "sparse_tensor_module_names": set(),
        "timers": missing_function("DeepSpeedEngine.timers", TIMERS),
        "tput_timer": EpochTimer(),
    }
    for name, value in names.items():
        setattr(engine, name, value)
    if engine.updater is not None:
        engine.updater.__dict__["optimizer"] = engine.updater  # DeepSpeed's wraps another one


def _nothing_to_reduce(bucket_size: int = 0) -> None:
    """Backward has reduced the gradients."""


def _optimizer_file(checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
    raise refused("DeepSpeedEngine._get_optimizer_ckpt_name", "its checkpoints have no such file; use load_checkpoint")
