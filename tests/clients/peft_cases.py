"""What the tests of PEFT run in the clients' processes: adapters under Trainer, and a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from tuning_cases import RATE, Report, adapters, common, fit, kept, llama, loaded, moved, rows


class Rows(Dataset[dict[str, Tensor]]):
    """The sentences as tensors, all of one length."""

    def __init__(self) -> None:
        self.rows = [{name: torch.tensor(ids[:20]) for name, ids in row.items()} for row in rows()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def lora(
    deepspeed: dict[str, Any] | str | None = None,
    *,
    ulps: int = 0,
    peft: dict[str, Any] | None = None,
    bf16_base: bool = False,
    recompute: bool | None = None,
    **more: Any,
) -> Report:
    """An adapter on a model of transformers, under Trainer.

    Args:
        peft: of the PEFT config; `kind` names its class.
        bf16_base: the frozen weights are bf16, PEFT keeps the adapters fp32.
        recompute: gradient checkpointing, reentrant or not; None: none.
    """
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    kept(ulps, dtype=torch.bfloat16 if bf16_base else torch.float32)
    if recompute is not None:
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": recompute}}
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    model = moved(get_peft_model(loaded(), adapters(**{"r": 4, **(peft or {})})), ulps)
    if recompute is not None:
        model.enable_input_require_grads()
    return fit(Trainer(model=model, args=args, train_dataset=Rows()), model)


# ---- a quantised base --------------------------------------------------------------------------


class Packed(nn.Linear):
    """A linear layer as QLoRA has it: uint8 codes and a scale a row, frozen, decoded for each use."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        weight = base.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = ((weight / scale).round() + 128).to(torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, ((self.weight.float() - 128) * self.scales).to(x.dtype))


def qlora(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """LoRA on a base whose linear layers are packed bytes; what is left of the base stays as it is, and frozen."""
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(7)
    base = pack(moved(llama(), ulps))
    before = {name: value.detach().clone() for name, value in base.state_dict().items() if value.dtype is torch.uint8}
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    model = get_peft_model(base, adapters(r=4))
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    report = fit(trainer, model)
    after = whole(trainer, model)
    report["codes"] = len(before)
    report["changed"] = [name for name, value in before.items() if not torch.equal(after[renamed(name, after)], value)]
    return report


def pack(model: nn.Module) -> nn.Module:
    """Every linear layer of the blocks becomes a packed one."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Packed(child))
    return model


def whole(trainer: Any, model: nn.Module) -> dict[str, Tensor]:
    """All values, whoever keeps them."""
    if trainer.is_deepspeed_enabled:
        import deepspeed

        with deepspeed.zero.GatheredParameters(model.parameters()):
            return {name: value.detach().clone() for name, value in model.named_parameters()}
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def renamed(name: str, known: dict[str, Tensor]) -> str:
    """A name of the base as PEFT's model has it."""
    first, _, last = name.rpartition(".")
    return next(full for full in known if full.endswith((f"{first}.base_layer.{last}", name)))


# ---- AdaLoRA -----------------------------------------------------------------------------------


def adalora(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, steps: int = 6) -> Report:
    """AdaLoRA looks at the gradients between backward and step, and takes ranks away by them."""
    from peft import get_peft_model
    from transformers import set_seed
    from transformers.integrations import HfDeepSpeedConfig

    set_seed(7)
    base = moved(llama(), ulps)
    keeper = HfDeepSpeedConfig(deepspeed) if deepspeed is not None else None  # PEFT asks for it
    set_seed(0)
    chosen = {"init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": steps, "beta1": 0.5}
    model = get_peft_model(base, adapters("AdaLoraConfig", **chosen)).train()
    report: Report = {"loss": [], "ranks": [], "engine": type(keeper).__module__}
    step = Stepper(model, deepspeed)
    for number, batch in zip(range(steps), batches(), strict=False):
        report["loss"].append(step(batch, number))
        report["ranks"].append(step.ranks)
    report["trainable"] = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    report["weights"] = {name: value for name, value in step.values().items() if name in report["trainable"]}
    return report


class Stepper:
    """Backward, what PEFT does by the gradients, and the step; through an engine or plain."""

    def __init__(self, model: nn.Module, deepspeed: dict[str, Any] | None) -> None:
        self.model, self.engine, self.ranks = model, None, 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
        if deepspeed is not None:
            import deepspeed as library

            self.engine = library.initialize(model=model, optimizer=self.optimizer, config=deepspeed)[0]

    def __call__(self, batch: dict[str, Tensor], number: int) -> float:
        if self.engine is None:
            loss = self.model(**batch).loss
            loss.backward()
            self.allocate(number)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.allocate(number)
            self.engine.step()
        return float(loss.detach())

    def allocate(self, number: int) -> None:
        """Let PEFT look at the gradients; what is left is counted before the step."""
        context: Any = nullcontext()
        if self.engine is not None:
            import deepspeed

            context = deepspeed.zero.GatheredParameters(self.model.parameters(), modifier_rank=0)
        with context:
            self.model.base_model.update_and_allocate(number)
            self.ranks = ranks_left(self.model)

    def values(self) -> dict[str, Tensor]:
        """All of them, as of the last step."""
        if self.engine is None:
            return {name: value.detach().clone() for name, value in self.model.named_parameters()}
        import deepspeed

        with deepspeed.zero.GatheredParameters(self.model.parameters()):
            return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def batches() -> Iterator[dict[str, Tensor]]:
    """Two rows each, again and again."""
    data = Rows()
    while True:
        for first in range(0, len(data), 2):
            pair = (data[first], data[first + 1])
            yield {name: torch.stack([row[name] for row in pair]) for name in pair[0]}


def ranks_left(model: nn.Module) -> int:
    """Singular values that AdaLoRA has not put to zero."""
    found = [parameter for name, parameter in model.named_parameters() if "lora_E" in name]
    return sum(int((parameter.detach().clone() != 0).sum()) for parameter in found)
