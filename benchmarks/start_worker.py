"""Loads a folder of safetensors and trains, in a process of its own: `python -m benchmarks.start_worker SPEC`.

SPEC is JSON: `folder` of the model, and either `model`, keys of its config, of which a random one is written there, or
`config`, `init` (load it under `zero.Init`), `tokens` of a step and `steps`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import transformers

import zero
from benchmarks.loop import emit, peak_rss_bytes


def write(spec: dict[str, Any]) -> dict[str, Any]:
    """A random model of that shape in bf16. Returns `parameters`."""
    config = transformers.AutoConfig.for_model(**spec["model"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(spec["folder"], max_shard_size="100GB")
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def start(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns `load_seconds`, `initialize_seconds`, `first_step_seconds`, `step_seconds` (the last), `seconds`.

    `seconds` is all until the first step's updates are done.
    """
    begin = time.perf_counter()
    with zero.Init(config_dict_or_path=spec["config"]) if spec["init"] else nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=torch.bfloat16)
    loaded_at = time.perf_counter()
    engine = zero.initialize(model=model, config=spec["config"])[0]
    ready_at = time.perf_counter()
    tokens = torch.randint(0, model.config.vocab_size, (1, spec["tokens"]), generator=torch.Generator().manual_seed(0))
    times = []
    with engine:
        for _ in range(spec["steps"]):
            step_begin = time.perf_counter()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            engine.synchronize()  # its updates too, which the next forward would do
            times.append(time.perf_counter() - step_begin)
        write_bytes = engine.statistics().nvme_write_bytes
    return {
        "load_seconds": loaded_at - begin,
        "initialize_seconds": ready_at - loaded_at,
        "first_step_seconds": times[0],
        "step_seconds": times[-1],
        "seconds": ready_at - begin + times[0],
        "nvme_write_bytes": write_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    emit("result", **(write if "model" in spec else start)(spec))
