"""One training run of a published model's shape, in a process of its own: `python -m benchmarks.shaped_worker SPEC`.

SPEC is JSON: `contestant` (ours, or activations: what plain torch takes beside weights and gradients), `config` (ours),
`model` (the keys of a Hugging Face config), `tuning` (full; adapters: LoRA by PEFT; lora: adapters over a quantised
base), `sequence`, `warmup`, `steps`, `path`. Weights are random: what is measured is bytes, memory and time.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import zero
from benchmarks.loop import emit, peak_rss_bytes, saved_bytes, timed_steps
from benchmarks.quantised import lora_over_codes
from offload.memory.host_memory import trim_heap

COUNTERS = (
    *("forward_seconds", "backward_seconds", "optimizer_seconds", "exposed_wait_seconds"),
    *("nvme_read_bytes", "nvme_write_bytes", "nvme_read_seconds", "nvme_write_seconds", "gathered_bytes"),
)


def build(spec: dict[str, Any], **changes: Any) -> nn.Module:
    """The model as the user's code makes it."""
    import transformers

    config = transformers.AutoConfig.for_model(**{**spec["model"], **changes})
    config.use_cache = False
    if spec["tuning"] == "lora":
        return lora_over_codes(config)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if spec.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if spec["tuning"] == "adapters":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    return model  # type: ignore[no-any-return]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Build, train and count."""
    begin = time.perf_counter()
    with zero.Init(config_dict_or_path=spec["config"]):
        model = build(spec)
    built_at = time.perf_counter()
    emit("built", seconds=built_at - begin, peak_rss_bytes=peak_rss_bytes())
    engine = zero.initialize(model=model, config=spec["config"])[0]
    ready_at = time.perf_counter()
    emit("ready", seconds=ready_at - built_at, peak_rss_bytes=peak_rss_bytes(), plan=engine.plan.table())
    generator = torch.Generator().manual_seed(0)
    before = engine.statistics()
    losses: list[float] = []

    def step() -> None:
        nonlocal before
        if engine.global_steps == spec["warmup"]:
            before = engine.statistics()
        tokens = tokens_of(spec, generator).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
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
            "build_seconds": built_at - begin,
            "initialize_seconds": ready_at - built_at,
            "plan_bytes": {tier: engine.plan.tier_bytes(tier) for tier in ("device", "host", "nvme")},
            "plan_rows": [(row.tier, row.array, row.nbytes) for row in engine.plan.rows],
            "baseline_rss_bytes": engine.plan.baseline_bytes,
            "live_numel_peak": after.live_numel_peak,
            "whole_experts": sum(after.whole_experts_by_unit.values()),
        }


def tokens_of(spec: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    """One sample."""
    return torch.randint(0, spec["model"]["vocab_size"], (1, spec["sequence"]), generator=generator)


def activations(spec: dict[str, Any]) -> dict[str, Any]:
    """Memory of a step of plain torch beside weights and gradients: `activation_bytes`.

    A model of one layer is run for real and its process watched: that gives the fixed part, what torch's libraries take
    at first use included. Each further layer adds what autograd keeps for it.
    """
    tokens = tokens_of(spec, torch.Generator().manual_seed(0))

    def make(layers: int) -> nn.Module:
        model = build(spec, num_hidden_layers=layers).bfloat16()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return model

    def loss_of(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    model = make(1)
    trim_heap()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    # First of all that is run, so that what torch loads at the first use of an optimizer and a kernel is in it.
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for _ in range(3):
        loss_of(model).backward()
    grown = peak_rss_bytes() - before
    saved = [saved_bytes(model, partial(loss_of, model)) for model in map(make, (1, 2))]
    further = (spec["model"]["num_hidden_layers"] - 1) * (saved[1] - saved[0])
    return {"seconds": 0.0, "activation_bytes": grown + further, "grown_bytes": grown}


def main() -> None:
    """Run what the specification says and print its figures."""
    spec = json.loads(sys.argv[1])
    torch.manual_seed(0)
    contestant = {"ours": run, "activations": activations}[spec.get("contestant", "ours")]
    emit("done", **contestant(spec), peak_rss_bytes=peak_rss_bytes(), torch=torch.__version__)


if __name__ == "__main__":
    main()
