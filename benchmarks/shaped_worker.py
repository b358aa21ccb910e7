"""One training run of a published model's shape, in a process of its own: `python -m benchmarks.shaped_worker SPEC`.

SPEC is JSON: `config` (ours), `model` (the keys of a Hugging Face config), `tuning` (full, or lora over a quantised
base), `sequence`, `warmup`, `steps`, `path`. Weights are random: what is measured is bytes, memory and time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import zero
from benchmarks.loop import emit, peak_rss_bytes, timed_steps
from benchmarks.quantised import lora_over_codes

COUNTERS = (
    *("forward_seconds", "backward_seconds", "optimizer_seconds", "exposed_wait_seconds"),
    *("nvme_read_bytes", "nvme_write_bytes", "nvme_read_seconds", "nvme_write_seconds", "gathered_bytes"),
)


def build(spec: dict[str, Any]) -> nn.Module:
    """The model, its values on NVMe; of a quantised one the base is frozen codes."""
    import transformers

    config = transformers.AutoConfig.for_model(**spec["model"])
    config.use_cache = False
    with zero.Init(config_dict_or_path=spec["config"]):
        if spec["tuning"] == "full":
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = lora_over_codes(config)
    return model


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Build, train and count."""
    began = time.perf_counter()
    model = build(spec)
    built = time.perf_counter()
    emit("built", seconds=built - began, peak_rss_bytes=peak_rss_bytes())
    engine = zero.initialize(model=model, config=spec["config"])[0]
    ready = time.perf_counter()
    emit("ready", seconds=ready - built, peak_rss_bytes=peak_rss_bytes(), plan=engine.plan.table())
    generator = torch.Generator().manual_seed(0)
    before = engine.statistics()
    losses: list[float] = []

    def step() -> None:
        nonlocal before
        if engine.global_steps == spec["warmup"]:
            before = engine.statistics()
        tokens = torch.randint(0, spec["model"]["vocab_size"], (1, spec["sequence"]), generator=generator)
        loss = engine(input_ids=tokens.to(engine.device), labels=tokens.to(engine.device)).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()

    with engine:
        measured = timed_steps(step, warmup=spec["warmup"], steps=spec["steps"], path=spec["path"])
        after = engine.statistics()
        return {
            **measured,
            **{name: (getattr(after, name) - getattr(before, name)) / spec["steps"] for name in COUNTERS},
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "losses": losses,
            "build_seconds": built - began,
            "initialize_seconds": ready - built,
            "plan_bytes": {tier: engine.plan.tier_bytes(tier) for tier in ("device", "host", "nvme")},
            "plan_rows": [(row.tier, row.plane, row.nbytes) for row in engine.plan.rows],
            "baseline_rss_bytes": engine.plan.baseline_bytes,
            "live_numel_peak": after.live_numel_peak,
            "whole_experts": sum(after.whole_experts_by_unit.values()),
        }


def main() -> None:
    """Run what the specification says and print its figures."""
    spec = json.loads(sys.argv[1])
    torch.manual_seed(0)
    emit("done", **run(spec), peak_rss_bytes=peak_rss_bytes(), torch=torch.__version__)


if __name__ == "__main__":
    main()
