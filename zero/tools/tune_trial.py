"""A few steps of a model under a configuration, in a process of its own: what they take, as JSON.

`python -m zero.tools.tune_trial` reads a JSON object from the standard input: `config`, `model` and `model_args` as
`zero plan` takes them, `sequence`, `steps`, `recompute`. The model is one of transformers': its forward takes
`input_ids` and `labels`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import zero
from offload.accelerator import is_accelerator, module_of
from zero.plan.machine import peak_rss_bytes
from zero.tools.plan_command import build_model

WARM_STEPS = 2
"""The first teaches the engine the order, in the second everything is laid out."""


def measure(task: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step, and the most memory that the device or this process held."""
    config = task["config"]
    with zero.Init(config_dict_or_path=config):
        model: Any = build_model(task["model"], task["model_args"])
    vocabulary = model.config.get_text_config().vocab_size
    if task["recompute"]:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    engine: Any = zero.initialize(model=model, config=config)[0]
    batch = config["train_micro_batch_size_per_gpu"]
    seconds = []
    try:
        for step in range(WARM_STEPS + task["steps"]):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, vocabulary, (batch, task["sequence"]), generator=generator).to(engine.device)
            began = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.synchronize()
            seconds.append(time.perf_counter() - began)
        on_device = is_accelerator(engine.device)
        peak = module_of(engine.device).max_memory_allocated() if on_device else peak_rss_bytes()
    finally:
        engine.close()
    return {"seconds": statistics.median(seconds[WARM_STEPS:]), "peak_bytes": peak}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
