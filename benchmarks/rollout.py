"""What does a rollout between two steps of training cost, next to transformers with all weights in memory?

A random Llama of 98 M parameters (bf16), weights and states on NVMe; `hybrid_engine` with room for all, half and a
quarter of the weights, and without it. Tokens come one by one for 8 sequences. The floor of the bytes is that of a
cycle: of weights that are used in turn a cache keeps a fixed part, and streams the rest through the room of a layer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import zero
from benchmarks.common import Candidate, Report, measure, parser

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
LAYERS, VOCABULARY, SEQUENCES, PROMPT = 24, 16384, 8, 32
SHARES = {"all": 1.0, "half": 0.5, "a quarter": 0.25}
BYTES_MARK = 1.1
LIVE_NUMEL = 20_000_000
"""What the plan has room for: the table of tokens and a layer or two."""


def model_of() -> Any:
    """Random weights; no end of sequence, so that every run is equally long."""
    import transformers

    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **SIZES)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def engine_of(path: Path, room_bytes: int | None) -> Any:
    """Everything on NVMe, and room for so many bytes of weights beside the plan; None: no hybrid engine."""
    offload = {"device": "nvme", "nvme_path": str(path)}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": dict(offload),
            "stage3_max_live_parameters": LIVE_NUMEL,
        },
    }
    if room_bytes is not None:
        with zero.initialize(model=model_of(), config=config)[0] as lean:
            planned_bytes = lean.plan.tier_bytes("device")
        config["memory_budget"] = {"device": planned_bytes + max(room_bytes - 2 * LIVE_NUMEL, 0)}
        config["hybrid_engine"] = {"enabled": True}
    return zero.initialize(model=model_of(), config=config)[0]


def generate(model: Any, tokens: int) -> float:
    """Seconds that so many tokens of each sequence take."""
    prompts = torch.randint(1, VOCABULARY, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(1))
    begin = time.perf_counter()
    model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - begin


def plain(tokens: int) -> Candidate:
    """transformers, all in memory."""
    model = model_of()
    return lambda: {"seconds": generate(model, tokens)}


def ours(engine: Any, tokens: int) -> Candidate:
    """A rollout, and what it read once what fits was there."""
    engine.eval()

    def run() -> dict[str, Any]:
        before = engine.statistics().nvme_read_bytes
        seconds = generate(engine, tokens)
        return {"seconds": seconds, "read_bytes": engine.statistics().nvme_read_bytes - before}

    return run


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True)
    parsed.add_argument("--tokens", type=int, default=16, help="new tokens of each sequence (16)")
    options = parsed.parse_args()
    report = Report("rollout", __doc__, options, folders=[options.path])
    ask(report, options)
    report.finish()


def ask(report: Report, options: argparse.Namespace) -> None:
    """Tokens a second against plain, bytes a token against the floor."""
    streamed = engine_of(options.path, None)
    weights_bytes = sum(unit.nbytes for unit in streamed.units)
    layer_bytes = min(unit.nbytes for unit in streamed.units if ".layers." in unit.name)
    report.figure("weights", weights_bytes, f"{weights_bytes / 1e6:.0f} MB")
    engines = {name: engine_of(options.path, round(share * weights_bytes)) for name, share in SHARES.items()}
    engines["without hybrid_engine"] = streamed
    candidates = {"plain": plain(options.tokens), **{name: ours(e, options.tokens) for name, e in engines.items()}}
    series = measure("rollout", candidates, rounds=options.rounds, warmups=1, disk=options.path)
    report.keep(series)
    for name in engines:
        report.mark(
            f"{name}: tokens a second / plain", series.ratios(lambda r, n=name: r["plain"].seconds / r[n].seconds)
        )
    for name, share in SHARES.items():
        per_token = series.median(name, "read_bytes") / options.tokens
        floor = weights_bytes - share * weights_bytes + layer_bytes if share < 1 else 0.0
        report.figure(f"{name}: bytes a token", per_token, f"{per_token / 1e6:.1f} MB")
        if floor:
            report.mark(f"{name}: bytes a token / cycle", [per_token / floor], at_most=BYTES_MARK)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
