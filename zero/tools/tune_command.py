"""Find the best configuration for a model on this machine by plans and short runs, and write it: tiers, micro-batch.

PATH is a folder for nvme_path. Plans decide what fits and predict the order of the tiers. The best two of them run a
few steps each. Then the micro-batch doubles for as long as samples a second grow and memory suffices.

Run as a module it is one such run: `python -m zero.tools.tune_command` reads a JSON object from the standard input
(`config`, `model` and `model_args` as `zero plan` takes them, `sequence`, `steps`, `recompute`), and prints what a step
takes as JSON. The model is one of transformers': its forward takes `input_ids` and `labels`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import zero
from offload.accelerator import is_accelerator, module_of
from offload.errors import BudgetError, ConfigError
from offload.files.trace_events import check_target
from offload.io.swapfile import check_folder
from offload.sizes import format_bytes
from zero.config.sources import read_json
from zero.plan.machine import peak_rss_bytes
from zero.tools.plan_command import (
    ASSUMED_MIXED_RATE,
    ASSUMED_READ_RATE,
    ModelPlans,
    Rates,
    build_model,
    build_on_meta,
    measure_update_rate,
)
from zero.tools.tune_search import (
    MICRO_BATCH,
    PLACEMENTS,
    TRIAL_SECONDS_MAX,
    Candidate,
    Trial,
    search,
    with_batch,
    with_tiers,
)

WARM_STEPS = 2
"""In the first step the engine learns the order of uses, in the second everything is laid out."""
DEFAULTS: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder of nvme_path")
    parser.add_argument("--write", metavar="FILE", type=Path, help="where the best configuration is written")
    parser.add_argument(
        "--model", metavar="MODEL", help="the model to run: a folder, config.json or id, as for zero plan"
    )
    parser.add_argument(
        "--base", metavar="CONFIG", help="the other keys of the configuration (bf16, AdamW, clipping 1)"
    )
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sample (512)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run (3)")
    parser.add_argument(
        "--on", choices=("none", "cpu", "nvme"), help="keep weights and optimizer states on this device"
    )
    parser.add_argument("--no-recompute", action="store_true", help="keep activations instead of recomputing them")


def run(options: argparse.Namespace) -> int:
    """Find the best configuration and write it. Raises ConfigError: nothing fits or runs."""
    _check_arguments(options)
    base = dict(DEFAULTS) if options.base is None else dict(read_json(options.base))
    candidates = _fitting_candidates(base, options)
    _say(f"running {WARM_STEPS + options.steps} steps with each placement; the best so far is in {options.write}")
    best = search(candidates, _TrialRunner(options), lambda trial, candidate: _write_best(options, trial, candidate))
    if best is None:
        names = ", ".join(candidate.name for candidate in candidates)
        raise ConfigError(
            f"zero tune: {options.model} did not run with weights/states on any of {names}; see the output above"
        )
    trial, _ = best
    _say(f"{options.write}: {_describe_trial(options, trial)}")
    return 0


def _check_arguments(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing or contradict each other, before anything runs."""
    if options.model is None or options.write is None:
        raise ConfigError(
            "zero tune: expected --model, the model to run, and --write FILE, the configuration to write; to measure "
            f"the disk alone, run: zero doctor --probe {' '.join(options.paths)}"
        )
    for path in options.paths:
        check_folder(path)
    if options.write.exists():
        raise ConfigError(f"zero tune: {options.write} already exists; remove it, or write another file")
    check_target(options.write)


def _say(line: str) -> None:
    print(line, flush=True)


def _describe_trial(options: argparse.Namespace, trial: Trial) -> str:
    return f"{trial.seconds:.3g} s a step of {trial.micro_batch} x {options.sequence} tokens"


def _write_best(options: argparse.Namespace, trial: Trial, candidate: Candidate) -> None:
    comment = f"zero tune: {_describe_trial(options, trial)} on this machine, {format_bytes(trial.peak_bytes)} at most"
    content = {"_comment": comment, **with_batch(candidate.content, trial.micro_batch)}
    options.write.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fitting_candidates(base: dict[str, Any], options: argparse.Namespace) -> list[Candidate]:
    """Each placement that fits this machine, the one expected to be fastest first."""
    plans = ModelPlans(_plan_options(options), build_on_meta(options.model))
    plans.config(base)  # an error in it is raised here; below it would look like a model that does not fit
    # The disk's real speed would not change the order, and the runs decide.
    rates = Rates(ASSUMED_READ_RATE, ASSUMED_MIXED_RATE, measure_update_rate(torch.float32), copy_bytes_per_second=None)
    rows = []
    for order, (weights, states) in enumerate(PLACEMENTS if options.on is None else ((options.on, options.on),)):
        content = with_tiers(base, weights, states, [os.path.abspath(path) for path in options.paths])
        try:
            layout, plan = plans.make_plan(content)
        except (BudgetError, ConfigError):
            continue
        moved_bytes, seconds = plans.cost(rates, layout, plan)
        rows.append((seconds if seconds is not None else 0.0, moved_bytes, order, f"{weights}/{states}", content))
    if not rows:
        raise ConfigError(
            f"zero tune: {options.model} does not fit on this machine with any placement; run `zero plan` to see "
            "what it needs"
        )
    return [Candidate(name, content) for *_, name, content in sorted(rows, key=lambda row: row[:3])]


def _plan_options(options: argparse.Namespace) -> argparse.Namespace:
    """Options of `zero plan` for this machine and one rank."""
    return argparse.Namespace(host=None, device=None, nvme=None, ranks=1, nodes=1, model=options.model)


class _TrialRunner:
    """Runs each trial in a separate process, so that a process killed for memory does not end the search."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def __call__(self, candidate: Candidate, micro_batch: int) -> Trial:
        options = self._options
        base = {key: value for key, value in candidate.content.items() if key != "train_batch_size"}
        task = {
            "config": {**base, MICRO_BATCH: micro_batch, "gradient_accumulation_steps": 1},
            "model": options.model,
            "model_args": "{}",
            "sequence": options.sequence,
            "steps": options.steps,
            "recompute": not options.no_recompute,
        }
        command = [sys.executable, "-m", "zero.tools.tune_command"]
        try:
            process = subprocess.run(
                command, input=json.dumps(task), capture_output=True, text=True, timeout=TRIAL_SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            trial = Trial(micro_batch, failure=f"took more than {TRIAL_SECONDS_MAX} s")
        else:
            trial = _read(process, micro_batch)
        _say(f"  weights/states on {candidate.name}, micro-batch {micro_batch}: {trial}")
        return trial


def _read(process: subprocess.CompletedProcess[str], micro_batch: int) -> Trial:
    if process.returncode == 0:
        return Trial(micro_batch, **json.loads(process.stdout.splitlines()[-1]))
    if process.returncode < 0:
        return Trial(micro_batch, failure=f"killed by signal {-process.returncode}")
    return Trial(micro_batch, failure=(process.stderr.strip().splitlines() or ["failed"])[-1])


def measure(task: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step, and the peak memory of the device or of this process."""
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
            begin_seconds = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.synchronize()
            seconds.append(time.perf_counter() - begin_seconds)
        on_device = is_accelerator(engine.device)
        peak = module_of(engine.device).max_memory_allocated() if on_device else peak_rss_bytes()
    finally:
        engine.close()
    return {"seconds": statistics.median(seconds[WARM_STEPS:]), "peak_bytes": peak}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
