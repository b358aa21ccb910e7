"""What does a training step on a GPU cost with weights and states elsewhere, next to its floor and to others?

The floor is the slowest of: plain torch's forward and backward, the bytes over PCIe, over the host's memory and over
the disk at the rates that gpu_copy and gpu_host have measured (`--rates`). Shape 1B: ours on several tiers with one and
four micro-batches of 4096 tokens, ours without offload, plain torch, FSDP2 with CPUOffloadPolicy. Shape 8B: a Llama on
24 GB of the device, weights on NVMe, states on the host. Each contestant is a process of its own with a time limit; one
that does not end in time counts with the steps it has done. Exits with status 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Report, parser
from benchmarks.gpu import LLAMAS, SHAPES, require_gpu
from benchmarks.gpu_floors import Rates, floors, slowest, work_of

DEVICE_BUDGET_BYTES = {"8B": 10_000_000_000}
"""Of the engine; activations, logits and torch's libraries come on top. Others have DeepSpeed's defaults as limits."""
DEVICE_LIMIT_BYTES = 24_000_000_000
"""All of what the 8 B model may take, as torch's allocator counts it."""
STALL_MARK = 0.05
"""Of a step, where nothing but the computation bounds it."""
TRACE_BYTES_MAX = 2_000_000
"""Compressed."""
WORKER, FSDP2 = "benchmarks.gpu_worker", "benchmarks.rivals.fsdp2"
DEEPSPEED = "benchmarks.rivals.deepspeed_training"
PLAIN = "torch, no offload"
PAIRS = (
    ("ours, no offload", PLAIN),
    *(("ours, cpu", rival) for rival in ("FSDP2, fp32 masters", "FSDP2, all bf16", "DeepSpeed, cpu, defaults")),
    *((f"ours, {way}", f"DeepSpeed, {way}") for way in ("cpu", "cpu, 4 micro-batches", "states on nvme")),
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A process, and its share of the time that is left."""

    name: str
    spec: dict[str, Any]
    share: float
    module: str = WORKER


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where an engine keeps what, and how many micro-batches a step has."""

    name: str
    weights: str
    states: str
    micro_steps: int
    share: float
    module: str = WORKER


TIERS = {
    "1B": (
        Tiers("ours, cpu", "cpu", "cpu", 1, 0.25),
        Tiers("DeepSpeed, cpu", "cpu", "cpu", 1, 0.3, DEEPSPEED),
        Tiers("ours, cpu, 4 micro-batches", "cpu", "cpu", 4, 0.25),
        Tiers("DeepSpeed, cpu, 4 micro-batches", "cpu", "cpu", 4, 0.3, DEEPSPEED),
        Tiers("ours, no offload", "none", "none", 1, 0.25),
        Tiers("ours, states on nvme", "cpu", "nvme", 1, 0.35),
        Tiers("DeepSpeed, states on nvme", "cpu", "nvme", 1, 0.4, DEEPSPEED),
        Tiers("ours, states on nvme, 4 micro-batches", "cpu", "nvme", 4, 0.35),
        Tiers("DeepSpeed, cpu, defaults", "cpu", "cpu", 1, 0.4, DEEPSPEED),
    ),
    "8B": (Tiers("ours, 8 B on 24 GB", "nvme", "cpu", 1, 1.0),),
}
TIERS["tiny"] = TIERS["1B"]
"""In the order of their interest: the last ones may find no time left. DeepSpeed has the JSON of ours and page-locked
host memory, which it uses if configured so, except with its defaults."""
TRACED = ("ours, cpu, 4 micro-batches", "ours, 8 B on 24 GB")


def config_of(tiers: Tiers, path: Path, batch: int, device_bytes: int | None) -> dict[str, Any]:
    """The engine's JSON."""

    def offload_to(tier: str) -> dict[str, Any]:
        pinned = {} if tiers.module == WORKER or tiers.name.endswith("defaults") else {"pin_memory": True}
        return {"device": tier, **pinned, **({"nvme_path": str(path)} if tier == "nvme" else {})}

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": tiers.micro_steps,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload_to(tiers.weights),
            "offload_optimizer": offload_to(tiers.states),
        },
    }
    return config if device_bytes is None else {**config, "memory_budget": {"device": device_bytes}}


def contestants(options: argparse.Namespace, trace: Path | None = None) -> list[Contestant]:
    """Those of a shape: plain torch first, for without it no floor is known; FSDP2, which starts slowly, last."""
    shape, path = SHAPES[options.shape], Path(options.path).resolve()
    common = {"shape": asdict(shape), "warmup": options.warmup, "steps": options.steps, "path": str(path)}
    device_bytes = DEVICE_BUDGET_BYTES.get(options.shape)
    chosen = []
    for tiers in TIERS[options.shape]:
        spec = {**common, "contestant": "ours", "config": config_of(tiers, path, shape.batch, device_bytes)}
        if tiers.states == "nvme":  # a step takes seconds
            spec |= {"warmup": 1, "steps": max(options.steps // 4, 1)}
        if tiers.module == DEEPSPEED:
            operators = ["cpu_adam", "async_io"] if tiers.states == "nvme" else ["cpu_adam"]
            spec |= {"contestant": "deepspeed", "operators": operators, "recomputing": True}
        spec["trace"] = str(trace) if trace is not None and tiers.name in TRACED else None
        spec["llama"] = LLAMAS["8B"] if options.shape == "8B" else None
        chosen.append(Contestant(tiers.name, spec, tiers.share, tiers.module))
    if options.shape == "8B":
        return chosen
    rivals = [("FSDP2, fp32 masters", "float32"), ("FSDP2, all bf16", "bfloat16")]
    return [
        Contestant(PLAIN, {**common, "contestant": "plain"}, 0.3),
        *chosen,
        *(Contestant(name, {**common, "dtype": dtype}, 0.7, FSDP2) for name, dtype in rivals),
    ]


def run(contestant: Contestant, seconds: float) -> dict[str, Any]:
    """What it printed within `seconds`: its figures, or with "why" those of the steps it has done."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", contestant.module, json.dumps(contestant.spec)],
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        )
        try:
            why = f"ended with status {child.wait(timeout=max(seconds, 1.0))}"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            why = f"not done after {seconds:.0f} s"
        stdout.seek(0)
        stderr.seek(0)
        return summarize(stdout.read(), stderr.read(), why)


def summarize(output: str, complaints: str, why: str) -> dict[str, Any]:
    """The figures of a contestant from its JSON lines: of all of it, and what each step reported."""
    steps, by_name = [], dict[str, dict[str, Any]]()
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a library talks too
        if not isinstance(event, dict):
            continue
        name = event.pop("event", "")
        if name == "step":
            steps.append(event)
        else:
            by_name[name] = event
    figures = {
        **by_name.get("done", {}),
        "plan": by_name.get("plan"),
        "ready_seconds": by_name.get("ready", {}).get("seconds"),
        "warmup_seconds": by_name.get("warmup", {}).get("seconds"),
        "step_seconds": [step["seconds"] for step in steps],
        "steps": steps,
    }
    if "refused" in by_name:
        figures["why"] = f"it does not fit: {by_name['refused']['why']}"
    elif "done" not in by_name:
        complaint = " | ".join(complaints.strip().splitlines()[-3:])
        figures["why"] = re.sub(r"\S*/site-packages/", "", f"{why}: {complaint}")  # no folders of this machine
    return figures


def median_of(figures: dict[str, Any], figure: str) -> float | None:
    """Of a figure that its steps reported; None where none did."""
    values = [step[figure] for step in figures["steps"] if figure in step]
    return statistics.median(values) if values else None


def judge_floor(
    report: Report, name: str, figures: dict[str, Any], micro_steps: int, compute: float | None, rates: Rates
) -> None:
    """One of ours against its floor; stalls have a bound where the computation alone bounds the step."""
    if not figures["step_seconds"] or not figures["plan"]:
        return
    seconds_by_name = floors(work_of(figures["plan"]["traffic"], micro_steps, compute), rates)
    bound = slowest(seconds_by_name)
    report.figure(
        f"{name}: floors", seconds_by_name, ", ".join(f"{k} {v:.3f} s" for k, v in seconds_by_name.items() if v)
    )
    for wait in ("exposed_wait_seconds", "device_wait_seconds"):
        shares = [step[wait] / step["seconds"] for step in figures["steps"] if wait in step]
        hidden = bound is not None and bound[0] == "compute"
        if shares:
            report.mark(f"{name}: {wait} / step", shares, at_most=STALL_MARK if hidden else None)
    if bound is not None:
        resource, seconds = bound
        report.mark(
            f"{name}: step / floor ({resource})", [step_seconds / seconds for step_seconds in figures["step_seconds"]]
        )


def judge(report: Report, newest: str, results: dict[str, dict[str, Any]], shape: str, rates: Rates) -> None:
    """What can be said now that the newest contestant has run."""
    figures, plain = results[newest], results.get(PLAIN)
    for tiers in TIERS[shape]:
        if tiers.name == newest and tiers.module == WORKER:
            compute = median_of(plain, "compute_seconds") if plain else None
            judge_floor(report, newest, figures, tiers.micro_steps, compute, rates)
    peak = max((step.get("peak_reserved_bytes", 0) for step in figures["steps"]), default=0)
    if shape == "8B" and peak:
        report.mark("8 B: peak device memory / 24 GB", [peak / DEVICE_LIMIT_BYTES], at_most=1.0)
    for our_name, rival in PAIRS:
        our_seconds, rival_seconds = (results.get(name, {}).get("step_seconds") for name in (our_name, rival))
        if newest in (our_name, rival) and our_seconds and rival_seconds:
            report.mark(
                f"step time, {our_name} / {rival}",
                [seconds / statistics.median(rival_seconds) for seconds in our_seconds],
            )


def keep_trace(report: Report, recorded: Path, target: Path | None) -> None:
    """Compress the timeline to where the caller wants it, if there is one and it is small."""
    if target is None or not recorded.exists():
        return
    packed = gzip.compress(recorded.read_bytes())
    recorded.unlink()
    if len(packed) > TRACE_BYTES_MAX:
        report.lack("timeline", f"{len(packed):,} bytes compressed are more than {TRACE_BYTES_MAX:,}")
    else:
        target.write_bytes(packed)


def show(report: Report, name: str, figures: dict[str, Any]) -> None:
    """Keep all its figures, print the first ones."""
    if "why" in figures:
        report.lack(name, figures["why"])
    times = figures["step_seconds"]
    text = f"{statistics.median(times):.3f} s" if times else "no step"
    for figure, label in (
        *(("exposed_wait_seconds", "waited"), ("device_wait_seconds", "device waited")),
        *(("gathered_bytes", "to the device"), ("peak_reserved_bytes", "peak device memory")),
        *(("nvme_read_bytes", "read"), ("nvme_write_bytes", "written")),
    ):
        value = median_of(figures, figure)
        if value:
            text += f", {label} {value:.3f} s" if figure.endswith("seconds") else f", {label} {value / 1e9:.2f} GB"
    report.figure(name, figures, text)


def main() -> None:
    """Measure and print; the JSON is written after every contestant."""
    arguments = parser(__doc__, rounds=1, disk=True)
    arguments.add_argument("--shape", choices=list(SHAPES), default="1B")
    arguments.add_argument("--warmup", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=8, help="a quarter of them with states on NVMe")
    arguments.add_argument("--seconds", type=float, default=480.0, help="for all contestants together")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="these contestants, in this order")
    arguments.add_argument("--rates", nargs="*", default=[], metavar="FILE", help="JSON that has rates")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="where a timeline is written, compressed")
    options = arguments.parse_args()
    require_gpu()
    ask(Report("gpu_step", __doc__, options, folders=[options.path]), options)


def ask(report: Report, options: argparse.Namespace) -> None:
    """Every contestant in turn."""
    rates = Rates.from_files(map(Path, options.rates))
    report.figure("rates: bytes/s", asdict(rates))
    results: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "trace.json"
        chosen = contestants(options, None if options.trace is None else recorded)
        if options.only:  # each may take all the time that is left
            by_name = {contestant.name: replace(contestant, share=1.0) for contestant in chosen}
            chosen = [by_name[name] for name in options.only]
        for contestant in chosen:
            left_seconds = end - time.monotonic()
            if left_seconds < 10:
                report.lack(contestant.name, "no time left")
                continue
            figures = results[contestant.name] = run(contestant, left_seconds * contestant.share)
            show(report, contestant.name, figures)
            keep_trace(report, recorded, options.trace)
            judge(report, contestant.name, results, options.shape, rates)
            report.finish()
    report.finish()


if __name__ == "__main__":
    main()
