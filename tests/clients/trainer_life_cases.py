"""A process with more than one training in it, and models that only look, as users of the Trainer have them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from client_models import VOCABULARY, Tokens, gpt2
from torch import nn
from trainer_cases import Report, arguments, fit
from trainer_more_cases import _whole


def searched(deepspeed: dict[str, Any] | None) -> Report:
    """`hyperparameter_search` with three learning rates, of which the last two are tried after the first."""
    from transformers import Trainer, set_seed

    rates = (1e-3, 3e-2, 1e-4)
    chosen = arguments(deepspeed, eval_strategy="steps", eval_steps=4)
    set_seed(0)

    def model_init() -> nn.Module:
        set_seed(1)
        return gpt2(0.0)

    trainer = Trainer(model_init=model_init, args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
    losses = []

    def objective(metrics: dict[str, float]) -> float:
        losses.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", *(2 * [rates[trial.number]]))},
        compute_objective=objective,
        n_trials=3,
        direction="minimize",
        backend="optuna",
    )
    return {"losses": losses, "best": best.run_id, "objective": best.objective}


def one_after_another(deepspeed: None, configs: list[dict[str, Any] | None]) -> list[Report]:
    """Trainers that nobody closes, each with its own config, in one process."""
    from transformers import Trainer, set_seed

    reports = []
    for config in configs:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # transformers leaves it behind
        chosen = arguments(config)
        set_seed(0)
        trainer = Trainer(model=gpt2(), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
        reports.append(fit(trainer))
    return reports


def resumed_beside(deepspeed: dict[str, Any], folder: str) -> dict[str, Report]:
    """A Trainer trains; another one in the same process resumes from its checkpoint.

    New arguments for each: they are what sets accelerate up.
    """
    from transformers import Trainer, set_seed

    def made() -> Any:
        chosen = arguments(deepspeed, output_dir=folder, save_strategy="steps", save_steps=2)
        set_seed(0)
        return Trainer(model=gpt2(), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))

    first = made()
    whole = fit(first)
    second = made()
    return {"whole": whole, "resumed": fit(second, resume=str(Path(folder) / "checkpoint-2"))}


class Headed:
    """A body out of files under a head with values of its own, as users write their models."""

    def __new__(cls, folder: str) -> Any:
        from transformers import GPT2Model
        from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel

        class WithHead(GPT2PreTrainedModel):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.transformer = GPT2Model(config)
                self.head = nn.Linear(config.hidden_size, 5)
                self.post_init()

            def _init_weights(self, module: nn.Module) -> None:
                super()._init_weights(module)
                if module is getattr(self, "head", None):
                    self.head.weight.data.fill_(-3.0)
                    self.head.bias.data.fill_(7.0)

        return WithHead.from_pretrained(folder)


def own_head(deepspeed: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """What the files have not is filled in by the class's own `_init_weights`."""
    from transformers import set_seed

    chosen = arguments(deepspeed)
    set_seed(0)
    return {"stage": chosen.deepspeed and 3, **_whole(Headed(folder))}


def positions(deepspeed: dict[str, Any] | None) -> dict[str, Any]:
    """GPT-J under 16 bits: its table of positions is made of a range, which must not be rounded."""
    from transformers import AutoModel, GPTJConfig

    chosen = arguments(deepspeed)
    config = GPTJConfig(vocab_size=VOCABULARY, n_positions=600, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    model = AutoModel.from_config(config)
    table = next(value for name, value in model.named_buffers() if name.endswith("embed_positions"))
    return {"table": table.detach().float().clone(), "stage": chosen.deepspeed and 3}


def looked_at(deepspeed: dict[str, Any] | None, **more: Any) -> Report:
    """What a notebook does after training: single values, norms, a forward of the model itself, one of the engine."""
    from transformers import Trainer, set_seed

    chosen = arguments(deepspeed, **more)
    set_seed(0)
    model = gpt2(0.0)
    trainer = Trainer(model=model, args=chosen, train_dataset=Tokens())
    report = fit(trainer)
    held = [model.transformer.ln_f.weight, model.transformer.wte.weight]
    with torch.no_grad(), _gathered(held, deepspeed):
        report["item"], report["norm"] = held[0].sum().item(), held[1].norm().item()
    with torch.no_grad():
        row = Tokens()[0]["input_ids"][None]
        report["logits"] = trainer.model.eval()(input_ids=row).logits.clone()
        report["wrapped"] = trainer.model_wrapped(input_ids=row).logits.clone()
    return report


def _gathered(parameters: list[nn.Parameter], deepspeed: dict[str, Any] | None) -> Any:
    if deepspeed is None:
        return nullcontext()
    import deepspeed as library

    return library.zero.GatheredParameters(parameters)


def unusual(deepspeed: dict[str, Any] | None, folder: str, optim: str, **more: Any) -> Report:
    """Another optimizer of the Trainer's, a checkpoint at each step and the best of them loaded at the end."""
    from transformers import Trainer, set_seed

    chosen = arguments(
        deepspeed,
        output_dir=folder,
        optim=optim,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        **more,
    )
    set_seed(0)
    trainer = Trainer(model=gpt2(0.0), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000))
    return fit(trainer, evaluates=True)


def resumed_wrongly(deepspeed: dict[str, Any], folder: str) -> list[str]:
    """What users are told of checkpoints that are not there."""
    from transformers import Trainer

    chosen = arguments(deepspeed, output_dir=folder)
    trainer = Trainer(model=gpt2(), args=chosen, train_dataset=Tokens())
    told = []
    for resume in (True, str(Path(folder) / "checkpoint-5-bogus")):
        try:
            trainer.train(resume_from_checkpoint=resume)
            told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def in_bf16(deepspeed: dict[str, Any] | None, **more: Any) -> Report:
    """The Trainer with the config's bf16; its own argument is refused where there is no GPU, so the config says it.

    transformers compares the two; what it would see on a GPU is put in after it has looked for one.
    """
    from transformers import Trainer, set_seed, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    chosen = arguments(deepspeed, bf16=True, **more)
    set_seed(0)
    return fit(Trainer(model=gpt2(0.0), args=chosen, train_dataset=Tokens(), eval_dataset=Tokens(4, 1000)))


def generated(deepspeed: dict[str, Any] | None, lengths: list[int]) -> Report:
    """Each rank generates as many tokens as it was told to, at stage 3 from weights that all of them have parts of."""
    import deepspeed as library
    from transformers import set_seed
    from transformers.integrations import HfDeepSpeedConfig

    rank = int(os.environ.get("RANK", "0"))
    keeper = HfDeepSpeedConfig(deepspeed) if deepspeed is not None else None
    set_seed(0)
    model = gpt2(0.0).eval()
    if deepspeed is not None:
        engine = library.initialize(model=model, config=deepspeed)[0]
        model = engine.module
    prompt = Tokens()[rank]["input_ids"][None, :4]
    found = model.generate(input_ids=prompt, max_new_tokens=lengths[rank], do_sample=False, pad_token_id=1)
    return {"tokens": found, "kept": keeper is not None}


def generated_plainly(deepspeed: None, rank: int, length: int) -> torch.Tensor:
    """What a rank has to generate."""
    from transformers import set_seed

    set_seed(0)
    prompt = Tokens()[rank]["input_ids"][None, :4]
    return gpt2(0.0).eval().generate(input_ids=prompt, max_new_tokens=length, do_sample=False, pad_token_id=1)
