"""TRL on several ranks, and what it does with models that only look. Runs in the clients' processes."""

from __future__ import annotations

import os
from typing import Any

from tuning_cases import SENTENCES, Report, common, dpo, grpo, kept, loaded, sft, tokenizer


def ranked(**more: Any) -> dict[str, Any]:
    """The arguments of a rank: on CPUs accelerate has to be told of gloo before they are made."""
    if "RANK" not in os.environ:
        return more
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    own = {"output_dir": f"out-{os.environ['RANK']}", "accelerator_config": {"use_configured_state": True}}
    return {**own, **more}


def sft_rank(deepspeed: dict[str, Any] | None = None, **more: Any) -> Report:
    """SFTTrainer on each rank."""
    return sft(deepspeed, **ranked(**more))


def dpo_rank(deepspeed: dict[str, Any] | None = None, **more: Any) -> Report:
    """DPOTrainer with a reference engine on each rank."""
    return dpo(deepspeed, **ranked(**more))


def grpo_rank(deepspeed: dict[str, Any] | None = None, **more: Any) -> Report:
    """GRPOTrainer on each rank: what is generated is as long as it gets there."""
    return grpo(deepspeed, **ranked(**more))


def grpo_evaluated(deepspeed: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """GRPOTrainer that only evaluates: it generates with an engine that has no optimizer."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    kept()
    own = {
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.1,
        "bf16": False,
        "per_device_eval_batch_size": 2,
    }
    args = GRPOConfig(**{**own, **common(deepspeed, **more)})
    set_seed(0)

    def many_letters(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    prompts = Dataset.from_dict({"prompt": [text[:9] for text in SENTENCES]})
    trainer = GRPOTrainer(
        model=loaded(),
        reward_funcs=many_letters,
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=tokenizer(),
    )
    set_seed(0)
    before = {**trainer.evaluate(), **trainer.state.log_history[-1]}  # TRL's own metrics may be in the log alone
    report: dict[str, Any] = {"engine": type(trainer.model_wrapped).__module__.partition(".")[0]}
    return {**report, **{key: before[key] for key in ("eval_reward", "eval_kl", "eval_loss") if key in before}}
