"""Adapters on a base that bitsandbytes has quantised, as QLoRA's tutorial has them. Runs in the clients' processes."""

from __future__ import annotations

from typing import Any

import torch
from peft_cases import Rows, whole
from torch import Tensor, nn
from tuning_cases import Report, adapters, common, fit, kept


def quantised(bits: int, storage: str = "uint8") -> Any:
    """The model that lies in `base`, loaded with its linear layers quantised."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == 8:
        chosen = BitsAndBytesConfig(load_in_8bit=True)
    else:
        chosen = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=getattr(torch, storage),
        )
    return AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32, quantization_config=chosen)


def qlora(
    deepspeed: dict[str, Any] | None = None,
    *,
    ulps: int = 0,
    bits: int = 4,
    storage: str = "uint8",
    peft: dict[str, Any] | None = None,
    width: int = 16,
    **more: Any,
) -> Report:
    """Load in 4 bits, prepare, put adapters on, train with checkpointing, evaluate."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import Trainer, TrainingArguments, set_seed

    kept(0, width=width)
    args = TrainingArguments(**common(deepspeed, **more))
    set_seed(0)
    base = quantised(bits, storage)
    base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(base, adapters(**{"r": 4, **(peft or {})}))
    moved_adapters(model, ulps)
    keep_layout(model)
    before = {name: bytes_of(value) for name, value in model.named_parameters() if is_quantised(value)}
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows())
    report = fit(trainer, model)
    report["eval_loss"] = trainer.evaluate()["eval_loss"]
    after = whole(trainer, model)
    report["codes"] = len(before)
    report["changed"] = [name for name, value in before.items() if not torch.equal(bytes_of(after[name]), value)]
    return report


def keep_layout(model: nn.Module) -> None:
    """Evaluation on a CPU that multiplies bf16 packs the codes anew inside the forward, for good; that is off."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantised(parameter: nn.Parameter) -> bool:
    """Packed codes, whatever dtype they are kept in."""
    return getattr(parameter, "quant_state", None) is not None or parameter.dtype in (torch.uint8, torch.int8)


def bytes_of(value: Tensor) -> Tensor:
    """A copy of what lies in memory."""
    return value.detach().clone().as_subclass(Tensor).contiguous().view(torch.uint8)


def moved_adapters(model: nn.Module, ulps: int) -> None:
    """Every weight that trains moved by so many units of its last place, up or down by turns."""
    with torch.no_grad():
        for parameter in model.parameters():
            if ulps and parameter.requires_grad:
                signs = torch.ones(parameter.numel()).view_as(parameter)
                signs.view(-1)[::2] = -1
                parameter.mul_(1 + signs * ulps * torch.finfo(torch.float32).eps)
