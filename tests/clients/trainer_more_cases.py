"""More of what users do with the Trainer: the best checkpoint, batch sizes that fit, models loaded and grown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from client_models import VOCABULARY, Tokens, gpt2, gpt2_config
from trainer_cases import Report, arguments, fit, weights


def best(deepspeed: dict[str, Any] | None, folder: str, **more: Any) -> Report:
    """Train until it gets worse, with the best checkpoint loaded at the end."""
    from transformers import Trainer, set_seed

    # The rate is too high on purpose: what comes after the first checkpoint is no better than that.
    chosen = arguments(
        deepspeed,
        output_dir=folder,
        max_steps=6,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        **{"learning_rate": 0.03, **more},
    )
    set_seed(0)
    trainer = Trainer(model=gpt2(), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
    report = fit(trainer, evaluates=True)
    report["best"] = Path(str(trainer.state.best_model_checkpoint)).name
    return report


class TooLarge:
    """A forward that has no memory for more than so many rows, as a device would say it."""

    def __init__(self, forward: Callable[..., Any], rows: int) -> None:
        self.forward, self.rows, self.tried = forward, rows, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: torch.Tensor, **more: Any) -> Any:
        self.tried.append(len(input_ids))
        if len(input_ids) > self.rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return self.forward(input_ids, **more)


def batch_that_fits(deepspeed: dict[str, Any] | None) -> Report:
    """Begin with batches that are too large; the Trainer looks for a size that fits, and trains with that."""
    from transformers import Trainer, set_seed

    chosen = arguments(deepspeed, per_device_train_batch_size=8, auto_find_batch_size=True)
    set_seed(0)
    model = gpt2(0.0)
    model.forward = limit = TooLarge(model.forward, 4)
    report = fit(Trainer(model=model, args=chosen, train_dataset=Tokens()))
    report["tried"] = sorted(set(limit.tried))
    return report


def write_model(deepspeed: None, folder: str) -> None:
    """A pretrained model in a folder: its body in `folder`/body, with its head in `folder`/whole."""
    from transformers import set_seed

    set_seed(5)
    model = gpt2()
    model.save_pretrained(Path(folder) / "whole")
    model.transformer.save_pretrained(Path(folder) / "body")


def from_pretrained(deepspeed: dict[str, Any] | None, folder: str, grown: int = 0) -> Report:
    """Load while the arguments are alive (at stage 3 that is under zero.Init), grow the vocabulary, train."""
    from transformers import AutoModelForCausalLM, Trainer, set_seed

    chosen = arguments(deepspeed)
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen = [parameter.ds_status.name for parameter in model.parameters() if hasattr(parameter, "ds_shape")]
    if grown:
        set_seed(1)  # before transformers 5 loading under zero.Init draws values, which the files then replace
        model.resize_token_embeddings(VOCABULARY + grown, mean_resizing=False)
    report = fit(Trainer(model=model, args=chosen, train_dataset=Tokens()))
    found = {"seen": bool(seen), "cut": "NOT_AVAILABLE" in seen}
    return {**report, **found, "rows": report["weights"]["lm_head.weight"].shape[0]}


def new_head(deepspeed: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """A body with a head that is not in the files: what its values are like."""
    from transformers import AutoModelForSequenceClassification, set_seed

    chosen = arguments(deepspeed)
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=40)
    return {"stage": chosen.deepspeed and 3, **_whole(model)}


def from_config(deepspeed: dict[str, Any] | None) -> dict[str, Any]:
    """A model of its configuration, as `from_config` makes it."""
    from transformers import AutoModelForCausalLM, set_seed

    chosen = arguments(deepspeed)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(gpt2_config())
    return {"stage": chosen.deepspeed and 3, **_whole(model)}


def _whole(model: torch.nn.Module) -> dict[str, Any]:
    import deepspeed

    held = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            held[name] = parameter.detach().clone()
    return {"weights": held}


def ranks(deepspeed: dict[str, Any], **more: Any) -> Report:
    """Training on several ranks of CPUs; accelerate has to be told of gloo."""
    from accelerate import PartialState
    from transformers import Trainer, set_seed

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    chosen = arguments(deepspeed, accelerator_config={"use_configured_state": True}, **more)
    set_seed(0)
    trainer = Trainer(model=gpt2(0.0), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
    report = fit(trainer, evaluates=True) if chosen.process_index == 0 else _beside(trainer)
    return {**report, "ranks": chosen.world_size}


def _beside(trainer: Any) -> Report:
    """What the other ranks do meanwhile: all of it but reading the files."""
    trainer.train()
    trainer.evaluate()
    trainer.predict(Tokens(4, 2000))
    trainer.save_model("saved")
    return {}


def exported(folder: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by DeepSpeed's recipe: into a fresh model, from the checkpoint's own files."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    model = load_state_dict_from_zero_checkpoint(gpt2(), folder)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def saved(folder: str) -> dict[str, torch.Tensor]:
    """The model that lies in a checkpoint."""
    return weights(folder)


def scheduled(deepspeed: dict[str, Any] | None, rates: list[float] | None = None, **more: Any) -> Report:
    """Train; without a config, with these learning rates, one a step, as a schedule would set them."""
    from transformers import Trainer, TrainerCallback, set_seed

    class Rates(TrainerCallback):
        """Notes the rate of each step, and sets it where it is given."""

        def __init__(self) -> None:
            self.used: list[float] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            for group in about["optimizer"].param_groups:
                group["lr"] = (rates or [])[state.global_step]

        def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            self.used.append(float(about["optimizer"].param_groups[0]["lr"]))

    chosen = arguments(deepspeed, max_steps=6, weight_decay=0.0, **more)
    set_seed(0)
    seen = Rates()
    if rates is None:
        del Rates.on_pre_optimizer_step
    trainer = Trainer(model=gpt2(0.0), args=chosen, train_dataset=Tokens(), callbacks=[seen])
    report = {**fit(trainer), "rates": seen.used}
    report["skipped"] = getattr(trainer.model_wrapped, "skipped_steps", 0)
    return report
