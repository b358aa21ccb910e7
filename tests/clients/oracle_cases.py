"""What is run on DeepSpeed itself and on us: users' scripts, whose weights are read in a way that both have right.

DeepSpeed's own collected state dict at stage 3 on a CPU is of memory that it has freed, so weights are gathered here.
Every case takes `ulps`: how far the initial weights are moved, which tells what rounding does to the run.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import accelerate_cases
import torch
import tuning_cases
from client_models import Tokens, gpt2
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_cases import Report, arguments, logged
from tuning_cases import moved

RATE = 1e-3
ADALORA_STEPS = 6


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole; all ranks call this."""
    import deepspeed

    held = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            held[name] = parameter.detach().clone()
    return held


def fit(trainer: Any, model: nn.Module, resume: str | None = None, **wanted: bool) -> Report:
    """Train and tell.

    Args:
        trainer: of transformers or TRL.
        model: whose weights are told.
        resume: folder of a checkpoint.
        wanted: `evaluates`: its loss afterwards; `best`: the name of the best checkpoint.
    """
    output = trainer.train(resume_from_checkpoint=resume)
    report: Report = {"train_loss": [output.training_loss], **logged(trainer.state.log_history)}
    report["steps"] = [trainer.state.global_step]
    if wanted.get("evaluates"):
        report["eval_losses"].append(trainer.evaluate()["eval_loss"])
    if wanted.get("best"):
        report["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    report["weights"] = gathered(model)
    report["engine"] = type(trainer.model_wrapped).__module__.partition(".")[0]
    return report


def train(
    deepspeed: dict[str, Any],
    *,
    ulps: int = 0,
    items: int = 16,
    dropout: float = 0.1,
    resume: str | None = None,
    evaluates: bool = False,
    best: bool = False,
    **more: Any,
) -> Report:
    """The Trainer on the tiny GPT-2, on one rank or several of CPUs."""
    from accelerate import PartialState
    from transformers import Trainer, set_seed

    if os.environ["WORLD_SIZE"] != "1":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        more["accelerator_config"] = {"use_configured_state": True}
    chosen = arguments(deepspeed, **more)
    set_seed(0)
    model = moved(gpt2(dropout), ulps)
    trainer = Trainer(model=model, args=chosen, train_dataset=Tokens(items), eval_dataset=Tokens(4, 1000))
    return fit(trainer, model, resume, evaluates=evaluates, best=best)


def tuned(deepspeed: dict[str, Any], kind: str, *, ulps: int = 0, **more: Any) -> Report:
    """One of TRL's trainers on the tiny Llama: `kind` names the case."""
    with patch.object(tuning_cases, "fit", fit):
        report: Report = getattr(tuning_cases, kind)(deepspeed, ulps=ulps, **more)
    return report


def adalora(deepspeed: dict[str, Any], *, ulps: int = 0) -> Report:
    """PEFT's AdaLoRA, which asks for gradients between backward and step and writes weights there."""
    import deepspeed as library
    import peft_cases

    told = peft_cases.adalora(deepspeed, ulps=ulps, steps=ADALORA_STEPS)
    told.update(train_loss=[sum(told["loss"]) / ADALORA_STEPS], steps=[ADALORA_STEPS])
    told.update({key: [] for key in ("grad_norm", "learning_rate", "eval_losses")})
    return {**told, "engine": library.DeepSpeedEngine.__module__.partition(".")[0]}


def loop(
    deepspeed: dict[str, Any],
    *,
    ulps: int = 0,
    mixed_precision: str = "no",
    items: int = 16,
    accumulation: int = 2,
    epochs: int = 1,
    evaluates: bool = False,
) -> Report:
    """accelerate's loop.

    Args:
        deepspeed: the config.
        ulps: see above.
        mixed_precision: no or bf16.
        items: in an epoch, in micro-batches of two.
        accumulation: micro-batches a step.
        epochs: how many.
        evaluates: after every micro-batch, also inside a group.
    """
    from accelerate.utils import set_seed

    chosen = accelerate_cases.accelerator(deepspeed, mixed_precision, accumulation)
    set_seed(0)
    model = moved(gpt2(0.0), ulps)
    prepared = chosen.prepare(model, DataLoader(Tokens(items), batch_size=2), *_optimizer(model))
    engine = prepared[0]
    told: Report = {"loss": [], "grad_norm": [], "learning_rate": [], "eval_losses": []}
    for _ in range(epochs):
        epoch(chosen, prepared, told, evaluates=evaluates)
    told["steps"], told["train_loss"] = [engine.global_steps], [sum(told["loss"]) / len(told["loss"])]
    told["weights"], told["engine"] = gathered(model), type(engine).__module__.partition(".")[0]
    return told


def _optimizer(model: nn.Module) -> tuple[Any, Any]:
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=8)


def epoch(chosen: Any, prepared: tuple[Any, ...], told: Report, *, evaluates: bool = False) -> None:
    """One turn through the data."""
    engine, loader, optimizer, scheduler = prepared
    held_out = next(iter(DataLoader(Tokens(2, 1000), batch_size=2)))
    for batch in loader:
        engine.train()
        with chosen.accumulate(engine):
            loss = engine(**batch).loss
            chosen.backward(loss)
            if chosen.sync_gradients:
                told["grad_norm"].append(float(chosen.clip_grad_norm_(engine.parameters(), 0.5)))
                told["learning_rate"].append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        told["loss"].append(loss.item())
        if evaluates:
            engine.eval()
            with torch.no_grad():
                told["eval_losses"].append(engine(**held_out).loss.item())
