"""The scripts that run on DeepSpeed itself and on us."""

from __future__ import annotations

from typing import Any

from client_configs import ADAMW, AUTO, WARMUP_DECAY, zero_config
from oracle import Row

CONFIGS: dict[str, Any] = {"optimizer": ADAMW, "scheduler": WARMUP_DECAY}
WARMUP_LR = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
}
DECAY = {"weight_decay": 0.1}
SAVING = {"save_strategy": "steps", "save_steps": 2}
BEST = {
    **{"max_steps": 6, "lr_scheduler_type": "constant", "learning_rate": 0.03, "load_best_model_at_end": True},
    **{"metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 2, "best": True, **SAVING},
}


def _trainer(stage: int) -> dict[str, Row]:
    own, configs = zero_config(stage), zero_config(stage, **CONFIGS)
    uneven = {"max_steps": -1, "num_train_epochs": 2, "items": 11, "gradient_accumulation_steps": 4, **DECAY}
    return {
        "its AdamW, linear": Row(config=own, more=DECAY),
        "its AdamW, linear, states on the CPU": Row(config=zero_config(stage, "cpu"), more=DECAY),
        "its AdamW, linear, 2 ranks": Row(config=own, ranks=2, more={"dropout": 0.0, **DECAY}),
        "config's AdamW, WarmupDecayLR": Row(config=configs, more=DECAY),
        "config's AdamW, WarmupDecayLR, 2 ranks": Row(config=configs, ranks=2, more={"dropout": 0.0, **DECAY}),
        "config's AdamW, WarmupDecayLR, resumed": Row(config=configs, more={**SAVING, **DECAY}, resumed="checkpoint-2"),
        "config's AdamW, its linear": Row(config=zero_config(stage, optimizer=ADAMW), more=DECAY),
        "resumed in the middle of the second epoch": Row(
            config=own, more={"max_steps": 8, "items": 12, **SAVING, "save_steps": 4, **DECAY}, resumed="checkpoint-4"
        ),
        "an incomplete last group": Row(config=own, more=uneven),
        "an incomplete last group, 2 ranks": Row(config=own, ranks=2, more={**uneven, "dropout": 0.0, "items": 20}),
        "evaluation after every step": Row(
            config=own, more={"eval_strategy": "steps", "eval_steps": 1, "evaluates": True}
        ),
        "max_grad_norm 0.1": Row(config=own, more={"max_grad_norm": 0.1}),
        "max_grad_norm 0": Row(config=own, more={"max_grad_norm": 0.0}),
        "the best checkpoint at the end": Row(config=own, more=BEST),
    }


def _tuned(config: dict[str, Any]) -> dict[str, Row]:
    def row(kind: str, **more: Any) -> Row:
        return Row(config=config, case="tuned", more={"kind": kind, **more})

    lora = {"r": 4}
    recomputed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    return {
        "SFTTrainer": row("sft"),
        "SFTTrainer, config's AdamW, WarmupLR": Row(
            config={**config, "optimizer": ADAMW, "scheduler": WARMUP_LR}, case="tuned", more={"kind": "sft"}
        ),
        "SFTTrainer, LoRA": row("sft", peft=lora),
        "SFTTrainer, LoRA, gradient checkpointing": row("sft", peft=lora, **recomputed),
        "SFTTrainer, DoRA": row("sft", peft={"r": 4, "use_dora": True}),
        "DPOTrainer, a reference engine": row("dpo"),
        "DPOTrainer, precomputed": row("dpo", precompute_ref_log_probs=True),
        "DPOTrainer, a reference that follows": row("dpo", sync_ref_model=True, ref_model_sync_steps=2),
        "GRPOTrainer": row("grpo"),
    }


def _adalora(stage: int) -> Row:
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    return Row(
        config=zero_config(stage, **batch, threshold=0, gradient_clipping=0.0, fp16=None, bf16=None),
        case="adalora",
        known="PEFT zeroes singular values between backward and step; DeepSpeed's step writes its own copy over them",
    )


def _loops(stage: int) -> dict[str, Row]:
    config = zero_config(stage, gradient_clipping=0.5)

    def row(**more: Any) -> Row:
        return Row(config=config, case="loop", more=more)

    return {
        "accumulation and clipping": row(),
        "an incomplete last group": row(items=10, epochs=2),
        "evaluation inside a group": row(evaluates=True),
    }


STAGES = (2, 3)
ROWS: dict[str, Row] = {
    **{f"Trainer, stage {stage}: {name}": row for stage in STAGES for name, row in _trainer(stage).items()},
    **{f"TRL, stage 3: {name}": row for name, row in _tuned(zero_config(3)).items()},
    **{f"PEFT, stage {stage}: AdaLoRA": _adalora(stage) for stage in STAGES},
    **{f"accelerate, stage {stage}: {name}": row for stage in STAGES for name, row in _loops(stage).items()},
}
