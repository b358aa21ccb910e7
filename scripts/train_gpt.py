"""Train a byte-level GPT whose weights and optimizer states live on NVMe, in host memory or on the device.

An example of the API: `build` makes the model under `zero.Init` and hands it to `zero.initialize`,
`train` is the loop. Everything else is text (corpus.py), a model (gpt.py), time (pace.py) and figures (report.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from corpus import Corpus, bigram_entropy, load_corpus, unigram_entropy
from gpt import GPT, Shape, shape_for
from pace import PARAMS, SECONDS, SEQUENCE, Schedule, age_seconds, fit
from report import Report, Span, TierBytes, draw, table
from tqdm import tqdm

import zero
from offload.accelerator import compute_device
from offload.errors import BudgetError, ConfigError, StorageError
from offload.kernels.matmul_speed import slow_bf16
from zero.plan.machine import peak_rss_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--offload", choices=("nvme", "cpu", "none"), default="nvme", help="home of weights and states (%(default)s)")
    add("--nvme-path", type=Path, default=REPOSITORY / ".swap", metavar="DIR", help="on a real disk (%(default)s)")
    add("--state-dtype", choices=("fp32", "bf16", "8bit"), default="fp32", help="of Adam's two moments (%(default)s)")
    add("--memory-budget", metavar="BYTES", help='host memory to use, such as 2GB or "auto"; more means less traffic')
    add("--config", type=Path, metavar="FILE", help="DeepSpeed JSON; its keys win over this script's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if torch sees one")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bf16, or fp32 where bf16 is clearly slower")
    add("--params", type=count, help=f"parameters; depth and width follow ({PARAMS / 1e6:.0f}M, fewer on a slow CPU)")
    add("--steps", type=int, help="optimizer steps, for a repeatable run (as many as --seconds allow)")
    add("--seconds", type=float, help=f"for the whole run, evaluation included ({SECONDS}; no limit with --steps)")
    add("--batch", type=int, default=4, help="sequences per step (%(default)s)")
    add("--sequence", type=int, help=f"bytes per sequence ({SEQUENCE}, fewer on a very slow CPU)")
    add("--lr", type=float, help="peak learning rate (0.8 / width)")
    add("--seed", type=int, default=0)
    add("--corpus", type=Path, metavar="PATH", help="file or folder of text (the Python standard library's sources)")
    add("--evaluate", type=count, default="32K", metavar="BYTES", help="held-out text to evaluate on (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE", default=Path("loss.png"), help="write the loss curve there (%(default)s)")
    options = parser.parse_args(arguments)
    if options.steps is None and options.seconds is None:
        options.seconds = SECONDS
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the engine takes a GPU when it sees one
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return options


def count(text: str) -> int:
    """Read 50M, 336e6, 32K or 1.5B."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
    unit = units.get(text[-1:].upper(), 1)
    return round(float(text if unit == 1 else text[:-1]) * unit)


def make_config(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """DeepSpeed's JSON for this run."""
    rate = options.lr or 0.8 / shape.width
    tier: dict[str, Any] = {"device": options.offload}
    if options.offload == "nvme":
        options.nvme_path.mkdir(parents=True, exist_ok=True)
        warn_of_memory(options.nvme_path.resolve())
        tier["nvme_path"] = str(options.nvme_path.resolve())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": options.dtype == "bf16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": tier,
            "offload_optimizer": {**tier, "state_dtype": options.state_dtype},
        },
    }
    if options.memory_budget:
        config["memory_budget"] = {"host": options.memory_budget}
    if options.config:
        config = merged(config, json.loads(options.config.read_text()))
    return config


def warn_of_memory(folder: Path) -> None:
    """Say so when swap files would lie in RAM; the run is valid, its figures are not a disk's."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if nearest is not None and nearest.fstype in ("tmpfs", "ramfs"):
        print(f"warning: {folder} is on {nearest.fstype}, which is memory; use --nvme-path to name a folder on a disk")


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the keys of `theirs`, block by block."""
    result = {**ours, **theirs}
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], dict) and isinstance(theirs[key], dict):
            result[key] = merged(ours[key], theirs[key])
    return result


def build(shape: Shape, config: dict[str, Any]) -> tuple[zero.ZeroEngine, Any]:
    """(engine, optimizer). Weights go to storage as constructors return: the model is never in memory as a whole."""
    with zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, optimizer, _, _ = zero.initialize(model=model, config=config)
    return engine, optimizer


def train(
    engine: zero.ZeroEngine, optimizer: Any, corpus: Corpus, schedule: Schedule, options: argparse.Namespace
) -> list[float]:
    """The loop; returns the loss of each step [nats]."""
    generator = torch.Generator().manual_seed(options.seed)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    with tqdm(total=100, bar_format="{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}", mininterval=1) as bar:
        while schedule.progress() < 1:
            for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
                group["lr"] = peak * schedule.rate()
            tokens, targets = corpus.batch(options.batch, options.sequence, generator)

            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()

            losses.append(loss.item())
            schedule.done += 1
            statistics = engine.statistics()
            speed = schedule.done * tokens.numel() / schedule.elapsed()
            moved_gb = (statistics.nvme_read_bytes + statistics.nvme_write_bytes) / 1e9
            figures = f"step {schedule.done}, loss {losses[-1]:.3f}, {speed:,.0f} bytes/s, NVMe {moved_gb:.1f} GB"
            bar.set_postfix_str(figures, refresh=False)
            bar.update(min(100 * schedule.progress(), 100) - bar.n)
    return losses


@torch.no_grad()
def evaluate(
    engine: zero.ZeroEngine, corpus: Corpus, schedule: Schedule, options: argparse.Namespace
) -> tuple[float, int]:
    """(mean loss [nats], bytes it is of): the held-out sample, or the part of it that --seconds leave time for."""
    engine.eval()
    total, rows, slowest = 0.0, 0, 0.0
    batches = corpus.held_out_batches(options.evaluate, 4 * options.batch, options.sequence)
    random.Random(0).shuffle(batches)  # so that a part is of the whole text too
    for tokens, targets in tqdm(batches, desc="evaluation", unit="batch"):
        start = schedule.elapsed()
        total += engine(tokens.to(engine.device), targets.to(engine.device)).item() * len(tokens)
        rows += len(tokens)
        slowest = max(slowest, schedule.elapsed() - start)
        if slowest > schedule.left():
            break
    engine.train()
    wanted = sum(len(tokens) for tokens, _ in batches)
    if rows < wanted:
        size = options.sequence
        print(f"evaluated on {rows * size:,} of {wanted * size:,} bytes: there was no time for more (--seconds)")
    return total / rows, rows * options.sequence


def settle(options: argparse.Namespace) -> None:
    """Choose what the command line leaves open, by what this machine computes fast; each choice is a line."""
    given = json.loads(options.config.read_text()) if options.config else {}
    if options.dtype == "auto":
        slow = "" if given.keys() & {"bf16", "fp16"} else slow_bf16(compute_device())
        options.dtype = "fp32" if slow else "bf16"
        if slow:
            print(f"training in fp32: {slow} (--dtype bf16 trains in bf16 all the same)")
    fit(options, compute_device(), DTYPES[options.dtype])


def run(options: argparse.Namespace) -> Report:
    """Build, train, evaluate."""
    settle(options)
    torch.manual_seed(options.seed)
    corpus = load_corpus(options.corpus, options.sequence)
    shape = shape_for(options.params, options.sequence)
    print(f"GPT with {shape.numel:,} parameters: {shape.layers} layers of width {shape.width}")
    print(f"text: {len(corpus.training):,} bytes to train on, {len(corpus.held_out):,} held out", flush=True)
    engine, optimizer = build(shape, make_config(options, shape))
    with engine:
        before = engine.statistics()
        schedule = Schedule(options, spent=age_seconds())
        losses = train(engine, optimizer, corpus, schedule, options)
        training_seconds, after = schedule.elapsed(), engine.statistics()
        validation_loss, evaluated_bytes = evaluate(engine, corpus, schedule, options)
        return Report(
            parameters=shape.numel,
            units=len(engine.units),
            steps=len(losses),
            tokens=len(losses) * options.batch * options.sequence,
            training_seconds=training_seconds,
            evaluation_seconds=schedule.elapsed() - training_seconds,
            tiers=TierBytes.of(engine, options.nvme_path),
            span=Span.between(before, after),
            peak_rss_bytes=peak_rss_bytes(),
            validation_loss=validation_loss,
            evaluated_bytes=evaluated_bytes,
            unigram_entropy=unigram_entropy(corpus.held_out),
            bigram_entropy=bigram_entropy(corpus.held_out),
            device=str(engine.device),
            aio_backend=after.aio_backend,
            isa=after.isa,
            losses=tuple(losses),
        )


def main() -> int:
    """Run and report."""
    options = parse_arguments()
    was_there = options.nvme_path.exists()
    try:
        report = run(options)
    except (ConfigError, BudgetError, StorageError) as error:
        print(f"train_gpt.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        with suppress(OSError):  # not empty: somebody else's files are there
            if not was_there:
                options.nvme_path.rmdir()
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    print(draw(report, options.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
