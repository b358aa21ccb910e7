"""Words of calls on one Trainer, as a notebook makes them; runs in the clients' processes."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from client_models import Tokens, gpt2
from trainer_cases import Report, arguments, logged, weights


def lived(
    deepspeed: dict[str, Any] | None, words: Sequence[Sequence[str]], dropout: float = 0.1, **more: Any
) -> list[list[Report]]:
    """For each word a new Trainer and what each of its calls returns."""
    return [Life(deepspeed, f"out-{number}", dropout, more).calls(word) for number, word in enumerate(words)]


def lived_on_ranks(deepspeed: dict[str, Any], words: Sequence[Sequence[str]], **more: Any) -> list[list[Report]]:
    """The same on each of several ranks of CPUs; accelerate has to be told of gloo."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return lived(deepspeed, words, 0.0, accelerator_config={"use_configured_state": True}, **more)


class Life:
    """One Trainer; the methods are the letters of a word."""

    def __init__(self, deepspeed: dict[str, Any] | None, folder: str, dropout: float, more: dict[str, Any]) -> None:
        from transformers import Trainer, set_seed

        if deepspeed is None:
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        self.plain, self.folder = deepspeed is None, Path(folder)
        every = {f"{what}_{key}": value for what in ("eval", "save") for key, value in EVERY_STEP.items()}
        given = {"output_dir": folder, "max_steps": 2, "metric_for_best_model": "loss", **every, **more}
        chosen = arguments(copy.deepcopy(deepspeed), **given)
        set_seed(0)
        data = {"train_dataset": Tokens(), "eval_dataset": Tokens(4, 1000)}
        self.trainer = Trainer(model=gpt2(dropout), args=chosen, **data)

    def calls(self, word: Sequence[str]) -> list[Report]:
        return [getattr(self, letter)() for letter in word]

    def evaluate(self) -> Report:
        return {"eval_loss": self.trainer.evaluate()["eval_loss"]}

    def predict(self) -> Report:
        found = self.trainer.predict(Tokens(4, 2000))
        return {"test_loss": found.metrics["test_loss"], "predictions": float(abs(found.predictions).sum())}

    def train(self, *, best: bool = False, resume: str | None = None) -> Report:
        self.trainer.args.load_best_model_at_end = best
        if self.plain:
            self.trainer.optimizer = None  # as transformers does under DeepSpeed: each training has states of its own
        output = self.trainer.train(resume_from_checkpoint=resume)
        return {"train_loss": output.training_loss, **logged(self.trainer.state.log_history)}

    def best(self) -> Report:
        return self.train(best=True)

    def resume(self) -> Report:
        return self.train(resume=str(self.folder / "checkpoint-1"))

    def save(self) -> Report:
        """The loss of the model that was saved, as its user loads it: of a few rows."""
        from transformers import GPT2LMHeadModel

        self.trainer.save_model("saved")
        self.trainer.accelerator.wait_for_everyone()
        rows = torch.stack([Tokens(4, 3000)[index]["input_ids"] for index in range(4)])
        with torch.no_grad(), torch.random.fork_rng():
            model = GPT2LMHeadModel(gpt2(0.0).config).eval()
            model.load_state_dict(weights("saved"))
            return {"saved_loss": model(input_ids=rows, labels=rows).loss.item()}


EVERY_STEP = {"strategy": "steps", "steps": 1}


def rounds(deepspeed: dict[str, Any], count: int) -> list[dict[str, int]]:
    """What is there after each round of evaluation and training with one Trainer: engines, threads, open files."""
    from zero.engine.engine import ZeroEngine

    life, found = Life(deepspeed, "out", 0.1, {"save_strategy": "no", "max_steps": 1}), []
    for _ in range(count):
        life.calls(("train", "evaluate"))
        gc.collect()
        engines = sum(isinstance(item, ZeroEngine) for item in gc.get_objects())
        hooks = sum(len(module._state_dict_hooks) for module in life.trainer.model.modules())
        files = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
        found.append({"engines": engines, "hooks": hooks, **files})
    return found
