"""Record a timeline of a few steps: compute, updates, reads, writes, copies, waits.

Trains a synthetic GPT under a DeepSpeed JSON, or runs a script of yours whose engine then records
itself, and writes Trace Event JSON (open it in ui.perfetto.dev or chrome://tracing) and, with --png, a picture.

  zero trace --config ds.json --layers 16 --hidden 1280 --png trace.png
  zero trace --png trace.png --script train.py --epochs 1
  zero trace --draw trace.json --png trace.png
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import zero
from offload.errors import ConfigError
from offload.files.trace_events import check_target
from offload.system.regular_files import read_regular
from zero.assembly.tracing import PATH_VARIABLE, STEPS_VARIABLE
from zero.tools.synthetic import Shape, SyntheticGPT, random_tokens
from zero.tools.trace_plot import draw, require_matplotlib, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--json",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="write the timeline to this file (%(default)s)",
    )
    add("--png", type=Path, metavar="FILE", help="also draw the timeline to this file; needs matplotlib")
    add("--steps", type=int, default=3, help="steps to record (%(default)s)")
    add(
        "--warmup",
        type=int,
        default=2,
        help="steps before the recorded ones, in which the engine learns the order of modules (%(default)s)",
    )
    source = parser.add_argument_group("what to record; give one of these")
    source.add_argument("--config", type=Path, metavar="FILE", help="DeepSpeed JSON for the synthetic GPT")
    source.add_argument(
        "--nvme-path",
        type=Path,
        metavar="DIR",
        help="the synthetic GPT in bf16, with everything on NVMe in this folder",
    )
    source.add_argument(
        "--draw", type=Path, metavar="FILE", help="record nothing, and draw a JSON that was recorded earlier"
    )
    source.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="FILE",
        help="a training script; everything after it is its own arguments",
    )
    model = parser.add_argument_group("the synthetic GPT")
    model.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    model.add_argument("--hidden", type=int, default=512, help="(%(default)s)")
    model.add_argument("--vocabulary", type=int, default=8192, help="(%(default)s)")
    model.add_argument("--sequence", type=int, default=128, help="tokens (%(default)s); the batch is the config's")


def run(options: argparse.Namespace) -> int:
    """Record, and draw if requested. Returns the exit status of the script if there is one.

    Raises ConfigError: options contradict each other, or a file cannot be written.
    """
    _check(options)
    if options.draw is not None:
        _draw(options.draw, options.png)
        return 0
    status = 0
    if options.script is not None:
        status = _run_script(options)
    else:
        _run_synthetic(options)
    print(f"timeline: {options.json} (open it in ui.perfetto.dev or chrome://tracing)")
    _draw(options.json, options.png)
    return status


def _check(options: argparse.Namespace) -> None:
    """Raise before the first step the errors that would otherwise appear after the last one."""
    sources = [name for name in ("config", "nvme_path", "draw", "script") if getattr(options, name) is not None]
    if len(sources) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sources) or "none"
        raise ConfigError(f"zero trace: expected one of --config, --nvme-path, --script and --draw, got {names}")
    if options.script == []:
        raise ConfigError("zero trace: expected the script's path after --script, got nothing; put --script last")
    if options.steps < 1 or options.warmup < 0:
        raise ConfigError(
            f"zero trace: expected --steps >= 1 and --warmup >= 0, got {options.steps} and {options.warmup}"
        )
    if options.draw is None:
        check_target(options.json)
    elif options.png is None:
        raise ConfigError("zero trace: --draw needs --png FILE")
    elif not options.draw.is_file():
        raise ConfigError(f"zero trace: --draw {options.draw}: expected a file; record one first")
    if options.png is not None:
        check_target(options.png)
        require_matplotlib()


def _draw(source: Path, target: Path | None) -> None:
    try:
        document = json.loads(read_regular(source))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise ConfigError(f"zero trace: --draw {source}: expected a recording in JSON, got {error}") from error
    print(summary(document))
    if target is not None:
        draw(document, target)
        print(f"picture: {target}")


def _run_script(options: argparse.Namespace) -> int:
    options.json.unlink(missing_ok=True)  # so that a file that is there afterwards is from this run
    steps = f"{options.warmup + 1}-{options.warmup + options.steps}"
    variables = {**os.environ, PATH_VARIABLE: str(options.json.resolve()), STEPS_VARIABLE: steps}
    status = subprocess.run([sys.executable, *options.script], env=variables, check=False).returncode
    if not options.json.exists():
        raise ConfigError(
            f"zero trace: {options.script[0]} ended with status {status} and recorded nothing: expected an engine of "
            f"zero.initialize that takes more than {options.warmup} steps; take more steps, or lower --warmup"
        )
    return status


def _run_synthetic(options: argparse.Namespace) -> None:
    config: Any = _nvme_config(options.nvme_path) if options.config is None else str(options.config)
    shape = Shape(options.layers, options.hidden, options.vocabulary, options.sequence)
    with zero.Init(config_dict_or_path=config):
        model = SyntheticGPT(shape)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with zero.initialize(model=model, config=config)[0] as engine:
        print(f"GPT with {numel:,} parameters in {len(engine.units)} units")
        _train(engine, shape, options.warmup)
        with engine.trace(options.json):
            _train(engine, shape, options.steps)


def _train(engine: zero.ZeroEngine, shape: Shape, steps: int) -> None:
    for number in range(steps * engine.gradient_accumulation_steps()):
        tokens = random_tokens(shape, engine.train_micro_batch_size_per_gpu(), seed=number)
        engine.backward(engine(tokens.to(engine.device)))
        engine.step()


def _nvme_config(folder: Path) -> dict[str, Any]:
    tier = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
    }
