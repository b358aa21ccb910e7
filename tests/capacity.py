"""One row of the capacity table: the least bytes of each tier for a published model, and the cost of a step.

A row is two plans of a model that is never built. The first plan gives the least bytes of each tier. The second plan is
made for one named machine; it gives the bytes that a step transfers and the seconds that this takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from offload.errors import BudgetError
from zero.assembly.model_plan import plan_model
from zero.config import Config, load_config
from zero.params.layout import Layout
from zero.params.units import packed_experts
from zero.plan.machine import Machine
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.plan.traffic import step_traffic
from zero.tools.plan_command import Rates, build_on_meta, step_time

SHAPES = Path(__file__).parent / "data" / "shapes"
TABLE = Path(__file__).parent.parent / "docs" / "capacity.md"
WRITE = "ZERO_WRITE_CAPACITY"
"""Environment variable: write the table instead of comparing the rows with it."""

PUBLISHED = {
    "qwen3-0.6b": "0.6",
    "vit-g": "1.01",
    "llama-3.2-1b": "1.24",
    "llama-3.1-8b": "8.03",
    "qwen3-30b-a3b": "30.5",
    "qwen3-32b": "32.8",
    "mixtral-8x7b": "46.7",
    "llama-3.1-70b": "70.6",
    "gpt-oss-120b": "116.8",
    "qwen3-235b-a22b": "235",
    "llama-3.1-405b": "406",
    "deepseek-v3": "671",
}
"""Model -> billions of parameters, as published."""
MODELS = tuple(PUBLISHED)
TUNINGS = ("full", "LoRA", "QLoRA")
STATES = ("fp32", "8bit")
RANKS = (1, 2, 8)
THRESHOLDS = (None, 0)

GPU = torch.device("cuda")
HOST_BYTES, DEVICE_BYTES = 64 * 10**9, 24 * 10**9
RATES = Rates(
    read_bytes_per_second=7e9, mixed_bytes_per_second=6e9, update_numel_per_second=3e9, copy_bytes_per_second=25e9
)
LORA_RANK = 16
SCALED_NUMEL, RESCALED_NUMEL = 64, 64 * 256
"""Number of weights that share a byte of scale, and of weights whose scales share a scale in fp32."""


@dataclass(frozen=True)
class Case:
    """The key of a row."""

    model: str
    tuning: str
    states: str = "fp32"
    ranks: int = 1
    threshold: int | None = None
    """Threshold of persistence; None: the default."""


CASES = tuple(
    Case(model, tuning, states, ranks, threshold)
    for model in MODELS
    for tuning in TUNINGS
    for ranks in RANKS
    for states in STATES
    for threshold in THRESHOLDS
)


@dataclass(frozen=True)
class Taken:
    """The numbers of a row."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    moved_bytes: int | None
    """None: the plan refuses the named machine."""
    seconds: float | None
    short: str
    """The tier of which the named machine has too little."""


# ---- models -----------------------------------------------------------------------------------


@cache
def build(model: str, tuning: str) -> nn.Module:
    """The model on the meta device; parameters that are not trained are frozen."""
    built = build_on_meta(str(SHAPES / f"{model}.json"))
    if tuning != "full":
        built.to(torch.bfloat16).requires_grad_(False)
        for blocks in [module for module in built.modules() if isinstance(module, nn.ModuleList)]:
            config = peft.LoraConfig(r=LORA_RANK, target_modules="all-linear")
            # Inject into the list of blocks, not the model: for some MoE models peft adapts more than nn.Linear.
            peft.inject_adapter_in_model(config, blocks, low_cpu_mem_usage=True)
    if tuning == "QLoRA":
        for module in list(built.modules()):
            if isinstance(module, BaseTunerLayer):
                quantise(module.get_base_layer(), "weight")
            elif packed_experts(module):
                for name in [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]:
                    quantise(module, name)
    return built


def quantise(module: nn.Module, name: str) -> None:
    """Replace a weight by frozen 4-bit codes, two to a byte, and their scales, quantised once more.

    Args:
        module: holds the weight; experts stay separate along the first of three dimensions.
        name: of the weight.
    """
    weight = module._parameters[name]
    assert weight is not None
    codes = torch.empty(*weight.shape[:-1], weight.shape[-1] // 2, dtype=torch.uint8, device="meta")
    apart = weight.shape[:1] if weight.dim() == 3 else ()
    numel = weight.numel() // math.prod(apart)
    # A byte for each 64 weights, and fp32 for each 256 such bytes.
    nbytes = -(-numel // SCALED_NUMEL) + 4 * -(-numel // RESCALED_NUMEL)
    scales = torch.empty(*apart, nbytes, dtype=torch.uint8, device="meta")
    setattr(module, name, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))


# ---- plans ------------------------------------------------------------------------------------


def content_of(case: Case) -> dict[str, Any]:
    """The README's configuration with the row's keys."""
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    zero: dict[str, Any] = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    if case.states != STATES[0]:
        zero["offload_optimizer"] = {**nvme, "state_dtype": case.states}
    if case.threshold is not None:
        zero["stage3_param_persistence_threshold"] = case.threshold
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": zero,
    }


def config_of(case: Case, **changes: Any) -> Config:
    """The validated configuration of a row, with `changes`."""
    return load_config({**content_of(case), **changes}, world_size=case.ranks, ranks_per_node=case.ranks)


def machine_of(host_bytes: int = HOST_BYTES, device_bytes: int = DEVICE_BYTES) -> Machine:
    """The machine of one rank; without arguments the page's machine."""
    return Machine(
        available_bytes=host_bytes,
        available_source="--host",
        memlock_bytes=None,
        device_bytes=device_bytes,
        rss_bytes=0,
    )


def plan_on(case: Case, machine: Machine, **changes: Any) -> tuple[Layout, Plan]:
    """The plan of a row on a machine.

    Raises:
        BudgetError: it does not fit.
    """
    return plan_model(build(case.model, case.tuning), config_of(case, **changes), machine, GPU, case.ranks)


@cache
def least_of(case: Case) -> tuple[int, int, int]:
    """Bytes of device, host and NVMe of the smallest plan."""
    model = build(case.model, case.tuning)
    plan = plan_model(model, config_of(case), machine_of(), GPU, case.ranks, smallest=True)[1]
    return plan.tier_bytes(DEVICE), plan.tier_bytes(HOST), plan.tier_bytes(NVME)


@cache
def measure(case: Case) -> Taken:
    """The row's numbers."""
    try:
        layout, plan = plan_on(case, machine_of())
    except BudgetError as refusal:
        return Taken(*least_of(case), None, None, "device" if "bytes of device memory" in str(refusal) else "host")
    traffic = step_traffic(plan, layout, on_gpu=True)
    moved_bytes = traffic.nvme_read_bytes + traffic.nvme_write_bytes
    return Taken(*least_of(case), moved_bytes, step_time(traffic, RATES).expected_seconds, "")


def changes_at_0(of: Callable[[Case], Taken]) -> dict[Change, str]:
    """The largest change of each column by threshold 0, and the model in which it occurs."""
    found: dict[Change, str] = {}
    for tuning in TUNINGS:
        defaults = [case for case in CASES if case.tuning == tuning and case.threshold is None]
        numbers = [(case.model, of(case), of(replace(case, threshold=0))) for case in defaults]
        for column, name in zip(COLUMNS, NUMBERS, strict=True):
            pairs = [(model, getattr(usual, name), getattr(other, name)) for model, usual, other in numbers]
            changes = [(other / usual - 1, model) for model, usual, other in pairs if usual and other]
            most, model = max(changes, key=lambda change: abs(change[0]))
            found[Change(tuning, column)] = f"{100 * most:+.1f} % ({model})" if abs(most) >= 0.0005 else "0"
    return found


# ---- the page ---------------------------------------------------------------------------------

COLUMNS = ("device", "host", "NVMe", "moved", "step")
NUMBERS = ("device_bytes", "host_bytes", "nvme_bytes", "moved_bytes", "seconds")
SECTIONS = {
    "One rank, fp32 states": (1, ("fp32",)),
    "One rank, 8-bit states": (1, ("8bit",)),
    "2 ranks, fp32 / 8-bit states": (2, STATES),
    "8 ranks, fp32 / 8-bit states": (8, STATES),
}
"""Heading -> (ranks, the states for which a cell has numbers); equal numbers are written once."""
MODELS_HEADING, CHANGES_HEADING = "Models", "Threshold 0"
COMMAND = (
    "zero plan tests/data/shapes/llama-3.1-8b.json ds.json --host 64GB --device 24GB --nvme 2TB \\\n"
    "    --read-rate 7GB --mixed-rate 6GB --copy-rate 25GB --update-rate 3e9"
)
INTRODUCTION = """# What a model takes

Written by the tests, not by hand: `{variable}=1 ./scripts/test --full tests/zero/test_capacity.py` makes the
plans that `zero plan` makes and writes this page. Nothing here was measured.

- `device` and `host` are the least memory, of each rank, for which a plan is accepted. A byte less of either is
  refused.
- `NVMe` is what that plan has on the drives: weights, optimizer states and gradients. With more host memory gradients
  stay there, and NVMe holds as much less.
- `moved` is what a step reads from NVMe and writes to it, on the machine below. A step uses every expert.
- `step` is the time that this takes there, with the CPU's updates and the copies to the GPU. The model's own
  computation runs beside it; where that takes longer, it counts.

Activations come on top. So does what CUDA, torch and the program itself take.

The machine has a GPU with 24 GB, 64 GB of free host memory, copies at 25 GB/s in each direction (PCIe 4), a drive that
reads 7 GB/s and reads and writes 6 GB/s at the same time, and a CPU that updates 3e9 elements a second. The drive is
large enough. Each rank has all of that for itself. "device is short" means that the machine is refused for its device.

The configuration is the README's: bf16, AdamW, stage 3, `offload_param` and `offload_optimizer` on NVMe, no
`memory_budget`, one micro-batch a step. 8-bit states are `offload_optimizer.state_dtype` "8bit". This command gives
`moved` and `step` of a row; `ds.json` is that configuration:

```bash
{command}
```

With `--host 1MB` or `--device 1MB` it is refused, and the message has the least `host` or `device`.

- *full* trains all parameters.
- *LoRA* trains adapters of rank {rank} on every `nn.Linear` of the blocks. The rest is frozen. Routers have no
  adapters, nor have experts that are packed into 3-D parameters.
- *QLoRA* is LoRA on a base of 4-bit codes: the blocks' `nn.Linear` weights and the packed experts. 64 weights share a
  byte of scale, and 256 such bytes share an fp32 number. The rest of the base is bf16.
"""
CHANGES = """\
By default `stage3_param_persistence_threshold` keeps parameters of up to 100,000 elements on the device. With 0 none
stay. The table has the largest relative change of each column over all rows above, and the model it is of. Small models
change most: more of their adapters, and of the scales of a 4-bit base, are below the default.
"""
WORDS = re.compile(r"\d+(\.\d+)? (B|KB|MB|GB|TB|ms|s)|-|(device|host) is short")


@dataclass(frozen=True)
class Change:
    """A cell of the table of changes by threshold 0."""

    tuning: str
    column: str


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    rows: dict[Case, tuple[str, ...]]
    """At the default threshold: a text for each of COLUMNS."""
    changes: dict[Change, str]


def words(taken: Taken) -> tuple[str, ...]:
    """The texts of a row on the page."""
    sizes = [in_bytes(size) for size in (taken.device_bytes, taken.host_bytes, taken.nvme_bytes)]
    if taken.moved_bytes is None or taken.seconds is None:
        return (*sizes, f"{taken.short} is short", "-")
    return (*sizes, in_bytes(taken.moved_bytes), in_seconds(taken.seconds))


def in_bytes(nbytes: int) -> str:
    """The size with three digits and a decimal unit."""
    return three_digits(nbytes, {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12})


def in_seconds(seconds: float) -> str:
    """The time with three digits."""
    return three_digits(seconds, {"ms": 1e-3, "s": 1.0})


def three_digits(value: float, units: dict[str, float]) -> str:
    """`value` in the largest unit in which it is at least 1."""
    rounded = float(f"{value:.3g}")
    name = max((name for name in units if rounded >= units[name]), key=units.__getitem__, default=next(iter(units)))
    in_units = float(f"{rounded / units[name]:.3g}")
    return f"{in_units:.{max(2 - math.floor(math.log10(in_units or 1)), 0)}f} {name}"


def render(page: Page) -> str:
    """The page."""
    lines = INTRODUCTION.format(variable=WRITE, command=COMMAND, rank=LORA_RANK).splitlines()
    lines += ["", f"## {MODELS_HEADING}", "", "| model | billions of parameters |", "|---|---|"]
    lines += [f"| {model} | {billions} |" for model, billions in PUBLISHED.items()]
    for heading, (ranks, states) in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| model | tuning | " + " | ".join(COLUMNS) + " |", "|---" * 7 + "|"]
        for model in MODELS:
            for tuning in TUNINGS:
                texts = [page.rows[Case(model, tuning, state, ranks)] for state in states]
                cells = [" / ".join(dict.fromkeys(cell)) for cell in zip(*texts, strict=True)]
                lines.append(f"| {model} | {tuning} | " + " | ".join(cells) + " |")
    lines += ["", f"## {CHANGES_HEADING}", "", *CHANGES.splitlines(), ""]
    lines += ["| tuning | " + " | ".join(COLUMNS) + " |", "|---" * 6 + "|"]
    for tuning in TUNINGS:
        lines.append(f"| {tuning} | " + " | ".join(page.changes[Change(tuning, column)] for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def parse(text: str) -> Page:
    """Read the page's content."""
    page, heading = Page({}, {}), ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| model ", "| tuning ")):
            name, *cells = line.strip("| ").split(" | ")
            if heading == CHANGES_HEADING:
                page.changes.update({Change(name, column): cell for column, cell in zip(COLUMNS, cells, strict=True)})
            elif heading in SECTIONS:
                ranks, states = SECTIONS[heading]
                for index, state in enumerate(states):
                    texts = [cell.split(" / ") for cell in cells[1:]]
                    page.rows[Case(name, cells[0], state, ranks)] = tuple(text[index % len(text)] for text in texts)
    return page
