"""More of PEFT: prompts that are learnt, adapters that come later, merging, saving and loading under stage 3."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from peft_cases import Rows, whole
from torch import Tensor, nn
from tuning_cases import Report, adapters, common, fit, kept, loaded, moved, saved


def other_kinds(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, kind: str, **more: Any) -> Report:
    """One of PEFT's other kinds of adapters, with little of its own."""
    import peft
    from transformers import Trainer, TrainingArguments, set_seed

    chosen: dict[str, dict[str, Any]] = {
        "PromptTuningConfig": {"num_virtual_tokens": 4},
        "PrefixTuningConfig": {"num_virtual_tokens": 4},
        "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "VeraConfig": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "AdaLoraConfig": {"init_r": 6, "target_r": 2, "total_step": 4, "target_modules": ["q_proj", "v_proj"]},
    }
    kept(ulps)
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **chosen[kind])
    model = moved(peft.get_peft_model(loaded(), config), ulps)
    return fit(Trainer(model=model, args=args, train_dataset=Rows()), model)


def second_adapter(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """Train an adapter, add another to the live model, train that one with a new Trainer; the first stays as it is."""
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    kept(ulps)
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    model = moved(get_peft_model(loaded(), adapters(r=4)), ulps)
    first = Trainer(model=model, args=args, train_dataset=Rows())
    first.train()
    before = {name: value for name, value in whole(first, model).items() if "lora_" in name}
    set_seed(1)
    model.add_adapter("later", adapters(r=2))
    model.set_adapter("later")
    args = TrainingArguments(**common(deepspeed, **more))
    report = fit(Trainer(model=model, args=args, train_dataset=Rows()), model)
    after = whole(first, model)
    report["changed"] = [name for name, value in before.items() if not torch.equal(after[name], value)]
    with gathered(first, model):
        model.save_pretrained("both")  # as a script does that does not save through the Trainer
    report["weights"] = {**saved("both"), **{f"later {name}": value for name, value in saved("both/later").items()}}
    return report


def gathered(trainer: Any, model: nn.Module) -> Any:
    """At stage 3 values are asked for like this; elsewhere it does nothing."""
    if not trainer.is_deepspeed_enabled:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def merged(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """Train, then merge into the weights and save a model that needs no PEFT.

    Under stage 3 the tutorials gather the parameters around it.
    """
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    kept(ulps)
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    model = moved(get_peft_model(loaded(), adapters(r=4)), ulps)
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    report = fit(trainer, model)
    report["weights"] = _merged(trainer, model)
    report["trainable"] = sorted(report["weights"])
    return report


def _merged(trainer: Any, model: nn.Module) -> dict[str, Tensor]:
    with gathered(trainer, model):
        return {name: value.detach().clone() for name, value in model.merge_and_unload().state_dict().items()}


def loaded_again(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """An adapter that was trained and saved is loaded over a base under `Init`, and trained further."""
    from peft import PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    kept(ulps)
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    model = moved(get_peft_model(loaded(), adapters(r=4)), ulps)
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    trainer.train()
    trainer.save_model("adapter")
    args = TrainingArguments(**common(deepspeed, **more))  # what sets accelerate up, and `Init` at stage 3
    again = PeftModel.from_pretrained(loaded(), "adapter", is_trainable=True)
    return fit(Trainer(model=again, args=args, train_dataset=Rows()), again)
