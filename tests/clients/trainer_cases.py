"""What the tests of transformers' Trainer run in the clients' processes: scripts as users write them.

Each takes the DeepSpeed config, a dict or None for the plain run, and returns what a user can see: the log, the
metrics and the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from client_models import Tokens, gpt2

Report = dict[str, Any]
LOGGED = ("loss", "grad_norm", "learning_rate")


def arguments(deepspeed: dict[str, Any] | str | None, **more: Any) -> Any:
    """TrainingArguments of a short run: 4 steps of 2 micro-batches of 2, as in most of the tests."""
    from transformers import TrainingArguments

    common = {
        "output_dir": "out",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "seed": 0,
    }
    return TrainingArguments(deepspeed=deepspeed, **{**common, **more})


def train(
    deepspeed: dict[str, Any] | str | None = None,
    *,
    dropout: float = 0.1,
    evaluates: bool = False,
    resume: str | None = None,
    **more: Any,
) -> Report:
    """Train the tiny GPT-2, evaluate and predict if asked to, save the model."""
    from transformers import Trainer, set_seed

    chosen = arguments(deepspeed, **more)
    set_seed(0)
    trainer = Trainer(model=gpt2(dropout), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
    return fit(trainer, evaluates=evaluates, resume=resume)


def fit(trainer: Any, *, evaluates: bool = False, resume: str | None = None) -> Report:
    """Train and tell."""
    output = trainer.train(resume_from_checkpoint=resume)
    report: Report = {"train_loss": output.training_loss, **logged(trainer.state.log_history)}
    report["global_step"] = trainer.state.global_step
    if evaluates:
        report["eval_loss"] = trainer.evaluate()["eval_loss"]
        report["predictions"] = torch.from_numpy(trainer.predict(Tokens(4, 2000)).predictions)
    trainer.save_model("saved")
    report["weights"] = weights("saved")
    report["model"] = type(trainer.model_wrapped).__name__
    return report


def logged(history: list[dict[str, Any]]) -> Report:
    """The log's columns; one entry per step."""
    steps = [entry for entry in history if "loss" in entry]
    columns: Report = {key: [float(entry[key]) for entry in steps if key in entry] for key in LOGGED}
    columns["eval_losses"] = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return columns


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The model that was saved, as its user loads it: tied weights under all of their names."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # in a script of its own
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # before transformers 5 it is fp32 else
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def evaluate(deepspeed: dict[str, Any] | None = None) -> float:
    """The loss of a model that is not trained."""
    from transformers import Trainer, set_seed

    chosen = arguments(deepspeed)
    set_seed(0)
    return float(Trainer(model=gpt2(), args=chosen, eval_dataset=Tokens(4, 1000)).evaluate()["eval_loss"])
