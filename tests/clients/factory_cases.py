"""LLaMA-Factory's supervised fine-tuning, as far as an engine sees it, in a few lines.

The package pins older versions of everything else, so its workflow is retold: tokens added and embeddings resized,
adapters or all weights, a Seq2SeqTrainer with an optimizer of its own, then train, save, evaluate, predict.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled
from tuning_cases import RATE, Report, adapters, fit, kept, loaded, rows, tokenizer

NEW_TOKENS = 6


class Factory(Seq2SeqTrainer):
    """A trainer that makes its optimizer itself, and hands generated tokens on without their prompt."""

    def create_optimizer(self, *args: Any, **more: Any) -> torch.optim.Optimizer:
        """Two groups with learning rates of their own, as LoRA+ has."""
        if self.optimizer is None:
            slow, fast = [], []
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    (fast if "lora_B" in name or parameter.dim() < 2 else slow).append(parameter)
            groups = [{"params": slow, "lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}]
            groups.append({"params": fast, "lr": 2 * self.args.learning_rate, "weight_decay": 0.0})
            self.optimizer = torch.optim.AdamW(groups)
        return super().create_optimizer(*args, **more)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None, **more: Any
    ) -> tuple[Any, Any, Any]:
        """No labels while generating; the prompt's tokens become padding."""
        labels = inputs.pop("labels", None) if self.args.predict_with_generate else inputs.get("labels")
        loss, tokens, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **more)
        if tokens is not None and self.args.predict_with_generate:
            tokens[:, : inputs["input_ids"].size(-1)] = self.processing_class.pad_token_id
            tokens = tokens.contiguous()
        return loss, tokens, labels


def resize(model: nn.Module, count: int) -> None:
    """More tokens; the new rows are the mean of the old and some noise, written where the weights are gathered."""
    model.resize_token_embeddings(count, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        context: Any = nullcontext()
        if is_deepspeed_zero3_enabled():
            import deepspeed

            context = deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0)
        with context, torch.no_grad():
            weight = layer.weight
            noise = torch.empty(NEW_TOKENS, weight.shape[1]).normal_(
                0, 0.02, generator=torch.Generator().manual_seed(1)
            )
            weight[-NEW_TOKENS:] = weight[:-NEW_TOKENS].mean(0) + noise


def sft(
    deepspeed: dict[str, Any] | str | None = None,
    *,
    finetuning_type: str = "lora",
    ulps: int = 0,
    **more: Any,
) -> Report:
    """The stage `sft`: `llamafactory-cli train` with `deepspeed:` in its YAML file."""
    kept(ulps)
    args = Seq2SeqTrainingArguments(**arguments(deepspeed, **more))
    set_seed(0)
    encode, model = tokenizer(), loaded()
    encode.add_special_tokens({"additional_special_tokens": [f"<new{n}>" for n in range(NEW_TOKENS)]})
    resize(model, len(encode))
    model = prepared(model, finetuning_type)
    data = list(rows())
    trainer = Factory(
        model=model,
        args=args,
        data_collator=DataCollatorForSeq2Seq(encode, model=model, pad_to_multiple_of=8, label_pad_token_id=-100),
        train_dataset=data[:12],
        eval_dataset=data[12:],
        processing_class=encode,
    )
    report = fit(trainer, model)
    trainer.save_state()
    args.predict_with_generate = False
    report["eval_loss"] = trainer.evaluate(metric_key_prefix="eval")["eval_loss"]
    args.predict_with_generate = True
    predicted = trainer.predict(data[12:14], metric_key_prefix="predict", max_new_tokens=4, do_sample=False)
    report["predicted"] = torch.as_tensor(predicted.predictions)
    return report


def prepared(model: nn.Module, finetuning_type: str) -> nn.Module:
    """What trains, in fp32: adapters, all weights, or the last block."""
    if finetuning_type == "lora":
        from peft import get_peft_model

        model.enable_input_require_grads()
        return get_peft_model(model, adapters(r=4))
    if finetuning_type == "freeze":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name)
        model.enable_input_require_grads()  # for the reentrant checkpoints; transformers 5 does so itself
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            parameter.data = parameter.data.float()
    return model


def arguments(deepspeed: dict[str, Any] | str | None, **more: Any) -> dict[str, Any]:
    """What its examples have: batches of one, accumulated, a cosine with a warm-up, checkpointing always on."""
    return {
        "output_dir": "out",
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "per_device_eval_batch_size": 1,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 0,
        "deepspeed": deepspeed,
        **more,
    }
