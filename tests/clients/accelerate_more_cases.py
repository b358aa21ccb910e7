"""More of accelerate: batch sizes that fit, plugins that change, groups with rates of their own, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate_cases import RATE, accelerator
from client_models import Tokens, gpt2
from torch.utils.data import DataLoader
from trainer_cases import Report
from trainer_more_cases import TooLarge


def batch_that_fits(deepspeed: dict[str, Any] | None, fused: bool = False) -> Report:
    """`find_executable_batch_size` around a training function, as the manual has it; each turn frees the last."""
    from accelerate.utils import find_executable_batch_size, set_seed

    chosen = accelerator(deepspeed, accumulation=1)
    tried: list[int] = []
    told: Report = {"grad_norm": [], "eval_losses": []}

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> dict[str, torch.Tensor]:
        tried.append(batch_size)
        told["loss"] = []
        chosen.free_memory()
        if deepspeed is not None:
            config = chosen.state.deepspeed_plugin.deepspeed_config
            config["train_micro_batch_size_per_gpu"] = config["train_batch_size"] = batch_size
        set_seed(0)
        model = gpt2(0.0)
        model.forward = TooLarge(model.forward, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        model, optimizer, loader = chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=batch_size))
        for batch in loader:
            loss = model(**batch).loss
            chosen.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told["loss"].append(loss.item())
        return {name: value.clone() for name, value in chosen.get_state_dict(model).items()}

    weights = train()
    return {**told, "weights": weights, "tried": tried}


def plugins(deepspeed: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Which plugin is in use, what transformers takes for its config, and what a second engine does to the first."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils.deepspeed import get_active_deepspeed_plugin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    first, second = DeepSpeedPlugin(hf_ds_config=deepspeed), DeepSpeedPlugin(hf_ds_config=other)
    chosen = Accelerator(deepspeed_plugin={"first": first, "second": second})
    told: dict[str, Any] = {"active": [], "stage 3": []}
    for name in ("first", "second", "first"):
        chosen.state.select_deepspeed_plugin(name)
        told["active"].append(get_active_deepspeed_plugin(chosen.state) is {"first": first, "second": second}[name])
        told["stage 3"].append(is_deepspeed_zero3_enabled())
    model = gpt2(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, _, _ = chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2))
    chosen.state.select_deepspeed_plugin("second")
    looked = chosen.prepare(gpt2(0.0).eval())
    told["first engine"] = chosen.deepspeed_engine_wrapped.engine is model
    told["evaluates"] = bool(torch.isfinite(looked(**_one()).loss))
    return told


def _one() -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in Tokens()[0].items()}


def kinds(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """The types that accelerate and its own checks compare exactly, and the config as it was filled in."""
    import deepspeed as library
    from accelerate.utils import DeepSpeedEngineWrapper, DummyOptim, DummyScheduler

    chosen = accelerator(deepspeed)
    model = gpt2(0.0)
    optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=1e-4)
    scheduler = DummyScheduler(optimizer, total_num_steps=1000, warmup_num_steps=10)
    model, optimizer, _, scheduler = chosen.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2), scheduler)
    refused = ""
    try:
        chosen.get_state_dict(model)
    except ValueError as error:
        refused = str(error)
    return {
        "engine": type(model) is library.DeepSpeedEngine,
        "wrapped": type(chosen.deepspeed_engine_wrapped) is DeepSpeedEngineWrapper,
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "config": chosen.deepspeed_config,
        "refused": refused,
    }


def grouped(deepspeed: dict[str, Any] | None, fused: bool = False, steps: int = 6) -> Report:
    """Two param groups with rates of their own and the config's warm-up over each of them."""
    from accelerate.utils import DummyScheduler, set_seed

    chosen = accelerator(deepspeed, accumulation=1)
    set_seed(0)
    model = gpt2(0.0)
    slow = [value for name, value in model.named_parameters() if "ln" in name]
    fast = [value for name, value in model.named_parameters() if "ln" not in name]
    groups = [{"params": fast, "lr": 2e-3}, {"params": slow, "lr": 1e-5}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=fused)
    if deepspeed is not None:
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=4, total_num_steps=20)
    else:
        # The first step is made with the least rate, and the schedule's first value is that too.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(step - 1, 0) / 4)
    model, optimizer, loader, scheduler = chosen.prepare(
        model, optimizer, DataLoader(Tokens(), batch_size=2), scheduler
    )
    told: Report = {"loss": [], "grad_norm": [], "eval_losses": [], "rates": []}
    for batch, _ in zip(loader, range(steps), strict=False):
        told["rates"].append([group["lr"] for group in optimizer.param_groups])
        loss = model(**batch).loss
        chosen.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        told["loss"].append(loss.item())
    state = chosen.get_state_dict(model)
    return {**told, "weights": {name: value.clone() for name, value in state.items()}}


def schedule_saved(deepspeed: dict[str, Any], folder: str, resume: bool = False) -> Report:
    """Half of the steps with dummies for the config's optimizer and schedule, or the other half in a new process."""
    from accelerate.utils import DummyOptim, DummyScheduler, set_seed

    chosen = accelerator(deepspeed, accumulation=1)
    set_seed(0)
    model = gpt2(0.0)
    optimizer = DummyOptim(model.parameters(), lr=RATE)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=3, total_num_steps=20)
    loader = DataLoader(Tokens(), batch_size=2)
    model, optimizer, loader, scheduler = chosen.prepare(model, optimizer, loader, scheduler)
    batches = list(loader)
    if resume:
        chosen.load_state(folder)
    told: Report = {"rates": [], "loss": []}
    for index in range(4 if resume else 0, 8):
        if index == 4 and not resume:
            chosen.save_state(folder)
        loss = model(**batches[index]).loss
        chosen.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        told["rates"].append(optimizer.param_groups[0]["lr"])
        told["loss"].append(loss.item())
    told["files"] = sorted(path.name for path in Path(folder).iterdir())
    return told
