"""Say what a model takes on each tier, and how long a step takes, without building it.

MODEL is a folder with a Hugging Face model, its config.json, a Hub id whose config.json is in the local cache, or
`module:callable`, something that returns a model when called. It is built on the meta device: no values, so that a
model of any size is planned in seconds. CONFIG is a DeepSpeed JSON. Without options the machine is this one. What does
not fit is refused with the knob to turn and the smallest machine that would do.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.accelerator import compute_device, planned_device
from offload.errors import BudgetError, ConfigError
from offload.io.probe import measure_disk
from offload.io.swapfile import check_folder
from offload.kernels.threads import scratch_update
from offload.sizes import format_bytes
from offload.streams import shares_host_memory
from offload.system.regular_files import read_regular
from zero.assembly.log import format_count
from zero.assembly.model_plan import plan_model
from zero.config import Config, load_config
from zero.config.numbers import parse_bytes
from zero.config.sources import check_depth, read_json, too_deep_error
from zero.config.swap_paths import swap_paths
from zero.params.layout import Layout
from zero.plan.machine import Machine, read_machine
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.plan.traffic import StepTraffic, step_traffic

RATE_NUMEL = 4 << 20
RATE_ROUNDS = 3
# [bytes per second] Of `--choices` where nothing is measured or given; docs/capacity.md is made with the same.
ASSUMED_READ_RATE, ASSUMED_MIXED_RATE, ASSUMED_COPY_RATE = 7e9, 6e9, 25e9
ON_A_DRIVE = {"device": "nvme", "nvme_path": "."}
DEFAULT = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_param": {**ON_A_DRIVE}, "offload_optimizer": {**ON_A_DRIVE}},
}
"""The configuration that is planned if no CONFIG is given."""
TIERS = (DEVICE, HOST, NVME)
PARAM, OPTIMIZER = "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    'memory_budget.host "auto"': {"memory_budget.host": "auto"},
    'offload_optimizer.state_dtype "8bit"': {f"{OPTIMIZER}.state_dtype": "8bit"},
    'offload_param.device "cpu"': {f"{PARAM}.device": "cpu"},
    'offload_optimizer.device "cpu"': {f"{OPTIMIZER}.device": "cpu"},
    'both devices "cpu"': {f"{PARAM}.device": "cpu", f"{OPTIMIZER}.device": "cpu"},
}
"""Name of a choice -> the keys that it sets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Transfer and update rates of this machine; None: not known."""

    read_bytes_per_second: float | None
    mixed_bytes_per_second: float | None
    update_numel_per_second: float | None
    copy_bytes_per_second: float | None
    notes: tuple[str, ...] = ()

    def with_assumed_rates(self) -> Rates:
        """These, and for what is not known the rates of a fast drive and of PCIe 4."""
        return dataclasses.replace(
            self,
            read_bytes_per_second=self.read_bytes_per_second or ASSUMED_READ_RATE,
            mixed_bytes_per_second=self.mixed_bytes_per_second or ASSUMED_MIXED_RATE,
            copy_bytes_per_second=self.copy_bytes_per_second or ASSUMED_COPY_RATE,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, without the model's own computation."""

    update_disk_seconds: float | None  # Reads and writes for the updates.
    update_seconds: float | None  # The CPU's arithmetic; overlaps with the disk's transfers.
    fetch_seconds: float | None  # Reads of units for backward and further forwards.
    copy_seconds: float | None  # Copies to and from a GPU; they overlap with everything else.
    expected_seconds: float | None  # None if one of them is not known.


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A row of `--choices`: what one changed key gives, or the reason why there is no plan with it."""

    name: str
    tier_bytes: Mapping[str, int]
    moved_bytes: int | None = None
    expected_seconds: float | None = None
    is_assumed: bool = False  # Whether the seconds are at rates that were not measured.
    refusal: str = ""

    def cells(self) -> list[str]:
        if self.refusal:
            return [self.name, self.refusal]
        mark = "~" if self.is_assumed else ""
        seconds = "not known" if self.expected_seconds is None else f"{mark}{self.expected_seconds:.3g} s"
        return [
            self.name,
            *(format_bytes(self.tier_bytes[t]) for t in TIERS),
            format_bytes(self.moved_bytes or 0),
            seconds,
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a config.json or a cached id of a Hugging Face model, or module:callable",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="DeepSpeed JSON file (default: bf16, AdamW, stage 3, everything on NVMe)",
    )
    parser.add_argument("--model-args", metavar="JSON", default="{}", help="keyword arguments of the callable")
    parser.add_argument("--stage", type=int, help="ZeRO stage, instead of the one in CONFIG")
    parser.add_argument("--world-size", "--ranks", dest="ranks", type=int, default=1, help="ranks (1)")
    parser.add_argument(
        "--nodes", type=int, default=1, help="number of nodes, with the same number of ranks on each (1)"
    )
    parser.add_argument("--host", type=_size, metavar="BYTES", help="free host memory, such as 64GB")
    parser.add_argument("--device", type=_size, metavar="BYTES", help="a GPU's free memory, such as 24GB")
    parser.add_argument("--nvme", type=_size, metavar="BYTES", help="free space of the drives, such as 2TB")
    for name, text in (
        ("read-rate", "bytes per second that the disk reads"),
        ("mixed-rate", "bytes per second that the disk reads and writes at the same time"),
        ("copy-rate", "bytes per second of copies to and from a GPU"),
    ):
        parser.add_argument(f"--{name}", type=_size, metavar="BYTES", help=text)
    parser.add_argument(
        "--update-rate", type=float, metavar="ELEMENTS", help="elements per second that the CPU updates"
    )
    parser.add_argument("--probe", action="store_true", help="measure the disks of nvme_path, about five seconds each")
    parser.add_argument("--choices", action="store_true", help="plan again with other settings, and compare")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    content = _content(options)
    config = _config(content, options)
    plans = ModelPlans(options, build_on_meta(options.model, options.model_args))
    least = plans.least({key: value for key, value in content.items() if key != "memory_budget"})
    if not options.json:
        print(f"{options.model}: {format_count(plans.numel)} parameters")
        sizes = ", ".join(
            f"{tier} {format_bytes(nbytes)}" for tier, nbytes in least.items() if nbytes or tier != DEVICE
        )
        shared = " (the device is a part of the host here)" if shares_host_memory(plans.device) else ""
        print(f"smallest machine, for each rank and without activations: {sizes}{shared}")
    layout, plan = plans.make_plan(content)
    traffic = plans.traffic(layout, plan)
    rates = find_rates(config, plan, traffic, options)
    seconds = step_time(traffic, rates)
    choices = plans.choices(content, rates) if options.choices else []
    if options.json:
        facts = {"parameters": plans.numel, "smallest_bytes": least}
        facts |= _as_dict(plan, layout, traffic, rates, seconds)
        print(json.dumps({**facts, "choices": [dataclasses.asdict(choice) for choice in choices]}, indent=1))
        return 0
    print("\n".join([plan.table(), *_time_lines(traffic, rates, seconds)]))
    if options.choices:
        choices.insert(0, plans.choice("CONFIG unchanged", rates, layout, plan))
        print("\n".join(["what each single change gives", *_choice_lines(choices)]))
        if any(choice.is_assumed for choice in choices):
            print(
                "  ~: at assumed speeds where none is measured or given: the drive reads "
                f"{ASSUMED_READ_RATE / 1e9:g} GB/s, or reads and writes {ASSUMED_MIXED_RATE / 1e9:g}, and copies to a "
                f"GPU pass at {ASSUMED_COPY_RATE / 1e9:g}"
            )
    return 0


class ModelPlans:
    """Plans of one model on one machine under several configurations."""

    def __init__(self, options: argparse.Namespace, model: nn.Module) -> None:
        self._options, self.model = options, model
        self.device = planned_device() if options.device is not None else compute_device()
        self.machine = _machine(options, self.device)
        self.numel = sum(p.numel() for p in model.parameters())

    def config(self, content: dict[str, Any]) -> Config:
        return _config(content, self._options)

    def make_plan(self, content: dict[str, Any]) -> tuple[Layout, Plan]:
        """Raises ConfigError, BudgetError."""
        config = self.config(content)
        layout, plan = plan_model(self.model, config, self.machine, self.device, self._options.ranks)
        _check_disk(plan, config, self._options)
        return layout, plan

    def least(self, content: dict[str, Any]) -> dict[str, int]:
        """The least bytes of each tier that the model needs, regardless of the sizes of the machine.

        If the device tier is host memory, its bytes count for the host, as in the plan's check against the machine.
        """
        config, ranks = self.config(content), self._options.ranks
        sizes = tier_sizes(plan_model(self.model, config, self.machine, self.device, ranks, smallest=True)[1])
        if shares_host_memory(self.device):
            sizes |= {DEVICE: 0, HOST: sizes[HOST] + sizes[DEVICE]}
        return sizes

    def traffic(self, layout: Layout, plan: Plan) -> StepTraffic:
        return step_traffic(plan, layout, on_gpu=not shares_host_memory(self.device))

    def cost(self, rates: Rates, layout: Layout, plan: Plan) -> tuple[int, float | None]:
        """Bytes that a step transfers to and from NVMe, and its seconds."""
        traffic = self.traffic(layout, plan)
        return traffic.nvme_read_bytes + traffic.nvme_write_bytes, step_time(traffic, rates).expected_seconds

    def choice(self, name: str, rates: Rates, layout: Layout, plan: Plan) -> Choice:
        moved_bytes, seconds = self.cost(rates, layout, plan)
        is_assumed = seconds is None
        if is_assumed:
            seconds = self.cost(rates.with_assumed_rates(), layout, plan)[1]
        return Choice(name, tier_sizes(plan), moved_bytes, seconds, is_assumed)

    def choices(self, content: dict[str, Any], rates: Rates) -> list[Choice]:
        """A row for each of `CHANGES` that `content` does not have yet and that has an effect on it."""
        choices = []
        for name, change in CHANGES.items():
            changed = copy.deepcopy(content)
            if not all([_set(changed, path, value) for path, value in change.items()]):  # as another row, or CONFIG
                continue
            try:
                choices.append(self.choice(name, rates, *self.make_plan(changed)))
            except ConfigError:  # it contradicts another key, so it is not a choice here
                continue
            except BudgetError as error:
                choices.append(Choice(name, {}, refusal=re.split(r"[;\n]", str(error))[0].strip()))
        return choices


def tier_sizes(plan: Plan) -> dict[str, int]:
    return {tier: plan.tier_bytes(tier) for tier in TIERS}


def _set(content: dict[str, Any], path: str, value: Any) -> bool:
    """Set a key. Returns False if nothing changed; a tier is only changed if something is offloaded already."""
    *blocks, key = path.split(".")
    block = content
    for name in blocks:
        block = block.setdefault(name, {})
        if not isinstance(block, dict):
            return False
    if block.get(key) == value or (blocks[0] == "zero_optimization" and block.get("device") in (None, "none")):
        return False
    block[key] = value
    return True


def _choice_lines(choices: list[Choice]) -> list[str]:
    head = ["with", *TIERS, "moved a step", "data movement"]
    rows = [head, *(choice.cells() for choice in choices)]
    widths = [max(len(row[column]) for row in rows if len(row) == len(head)) for column in range(1, len(head))]
    first = max(len(row[0]) for row in rows)
    # A refusal is one cell, so it has no width to keep.
    padded = [[cell.rjust(width) for cell, width in zip(row[1:], widths, strict=False)] for row in rows]
    return [f"  {row[0].ljust(first)}  {'  '.join(cells)}".rstrip() for row, cells in zip(rows, padded, strict=True)]


def _content(options: argparse.Namespace) -> dict[str, Any]:
    """The content of CONFIG, changed by --stage."""
    if options.ranks < 1:
        raise ConfigError(f"--world-size: expected at least 1, got {options.ranks}")
    if options.nodes < 1 or options.ranks % options.nodes:
        raise ConfigError(f"--nodes: expected a divisor of {options.ranks}, the number of ranks, got {options.nodes}")
    content = dict(DEFAULT if options.config is None else read_json(options.config))
    if options.stage is not None:
        block = content.get("zero_optimization")
        content["zero_optimization"] = {**(block if isinstance(block, dict) else {}), "stage": options.stage}
    return content


def _config(content: dict[str, Any], options: argparse.Namespace) -> Config:
    return load_config(content, world_size=options.ranks, ranks_per_node=_ranks_per_node(options))


def _ranks_per_node(options: argparse.Namespace) -> int:
    return int(options.ranks // options.nodes)


def build_on_meta(source: str, arguments: str = "{}") -> nn.Module:
    """`build_model` without the values of parameters; a constructor may compute with other tensors."""
    try:
        with torch.device("meta"):
            return build_model(source, arguments)
    except RuntimeError:  # it reads values, those of torch.linspace for example: only its parameters go to meta
        with _parameters_on_meta():
            return build_model(source, arguments)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":  # else it may be tied
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_model(source: str, arguments: str = "{}") -> nn.Module:
    """The model that `source` names, with the weights of its constructor.

    Raises ConfigError: it names no model; says what is wrong.

    `source`: a folder, a json file, an id in the Hub's cache, or `module:callable`; `arguments`: JSON object, keyword
    arguments of the callable.
    """
    try:
        keywords = json.loads(arguments)
    except ValueError as error:
        raise ConfigError(f"--model-args: not valid JSON: {error}") from error
    except RecursionError as error:
        raise too_deep_error("--model-args") from error
    check_depth(keywords, "--model-args")
    if not isinstance(keywords, dict):
        raise ConfigError(f"--model-args: expected an object {{...}}, got {arguments}")
    model = _from_callable(source, keywords) if ":" in source else _from_json(_config_file(source))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def _from_callable(source: str, keywords: dict[str, Any]) -> Any:
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"MODEL: {source} cannot be imported: {error}") from error
    try:
        return target(**keywords)
    except TypeError as error:
        raise ConfigError(f"MODEL: {source} cannot be called: {error}; pass its arguments with --model-args") from error


def _config_file(source: str) -> Path:
    """The path of the config.json that `source` names. Raises ConfigError: there is none."""
    if source.endswith(".json"):
        return Path(source)
    if Path(source).is_dir():
        return Path(source) / "config.json"
    try:
        path = importlib.import_module("huggingface_hub").try_to_load_from_cache(source, "config.json")
    except (ImportError, ValueError):  # not installed; no id
        path = None
    if not isinstance(path, str):
        raise ConfigError(
            f"MODEL: expected a folder, a file that ends in .json, an id whose config.json is in the Hub's local "
            f"cache, or module:callable, got {source!r}; for an id, run: hf download {source} config.json"
        )
    return Path(path)


def _from_json(path: Path) -> Any:
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise ConfigError(f"MODEL: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"MODEL: {path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise too_deep_error(f"MODEL: {path}") from error
    check_depth(content, f"MODEL: {path}")
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind is None:
        raise ConfigError(f'MODEL: {path} has no "model_type"; expected the config.json of a Hugging Face model')
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"MODEL: {path} needs transformers, which is not installed: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**content)
    except ValueError as error:
        raise ConfigError(f"MODEL: {path}: transformers does not know model_type {kind!r}") from error
    classes = [getattr(transformers, name, None) for name in content.get("architectures") or ()]
    if classes and classes[0] is not None:
        return classes[0](config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _machine(options: argparse.Namespace, device: torch.device) -> Machine:
    described = options.host is not None or options.device is not None
    here = read_machine(torch.device("cpu") if options.device is not None else device)
    changes: dict[str, Any] = {"rss_bytes": 0, "memlock_bytes": None} if described else {}
    if options.host is not None:
        changes |= {"available_bytes": options.host, "available_source": "--host"}
    if options.device is not None:
        changes["device_bytes"] = options.device
    machine = dataclasses.replace(here, **changes)
    machine = dataclasses.replace(machine, available_bytes=machine.available_bytes // _ranks_per_node(options))
    if options.device is None and shares_host_memory(device):  # the device's memory is the host's
        machine = dataclasses.replace(machine, device_bytes=machine.available_bytes)
    return machine


def _check_disk(plan: Plan, config: Config, options: argparse.Namespace) -> None:
    """Raise BudgetError if the plan needs more than the drives have; folders that do not exist here are not checked."""
    need, free, where = plan.swap_bytes * _ranks_per_node(options), options.nvme, "--nvme"
    folders = [Path(path) for path in swap_paths(config)]
    if free is None and folders and all(folder.is_dir() for folder in folders):
        devices = {folder.stat().st_dev: os.statvfs(folder) for folder in folders}
        free = sum(stats.f_bavail * stats.f_frsize for stats in devices.values())
        where = ", ".join(map(str, folders))
    if free is not None and need > free:
        raise BudgetError(
            f"the plan needs {need:,} bytes of NVMe, and {where} has {free:,}; add a folder to nvme_path, move "
            "weights or optimizer states to host memory with device cpu, or set "
            f"offload_optimizer.state_dtype\n{plan.table()}"
        )


def find_rates(config: Config, plan: Plan, traffic: StepTraffic, options: argparse.Namespace) -> Rates:
    """Rates from the options; else the CPU's rate measured now, and with --probe the disk's too."""
    read_rate, mixed_rate, update_rate = options.read_rate, options.mixed_rate, options.update_rate
    notes = []
    if plan.swap_bytes and (read_rate is None or mixed_rate is None):
        if options.probe:
            by_device = {folder.stat().st_dev: folder for folder in map(check_folder, swap_paths(config))}
            speeds = [measure_disk(folder) for folder in by_device.values()]
            read_rate = read_rate or sum(speed.read for speed in speeds)
            mixed_rate = mixed_rate or sum(speed.mixed for speed in speeds)
            notes.append("the disk's speed was measured just now")
        else:
            notes.append("the disk's speed is not known: pass --probe, which measures it, or --read-rate, --mixed-rate")
    if update_rate is None and traffic.host_updated_numel:
        update_rate = measure_update_rate(plan.state_dtype)
        notes.append("the update rate was measured on this machine just now")
    if options.copy_rate is None and (traffic.copied_in_bytes or traffic.copied_out_bytes):
        notes.append("the speed of copies to the GPU is not known: pass --copy-rate")
    return Rates(read_rate, mixed_rate, update_rate, options.copy_rate, tuple(notes))


def measure_update_rate(state_dtype: torch.dtype) -> float:
    """Elements per second that Adam's CPU kernel updates here, for bf16 weights with a split master."""
    update, seconds = scratch_update(RATE_NUMEL, state_dtype), []
    for _ in range(RATE_ROUNDS):
        begin = time.perf_counter()
        update(max(torch.get_num_threads(), 1))
        seconds.append(time.perf_counter() - begin)
    return RATE_NUMEL / min(seconds)


def step_time(traffic: StepTraffic, rates: Rates) -> StepTime:
    """Seconds of a step at these rates: the slower of disk and CPU for updates, then the fetches. A pure function."""
    copied_bytes = max(traffic.copied_in_bytes, traffic.copied_out_bytes)  # both directions at once
    update_bytes = traffic.update_read_bytes + traffic.update_write_bytes
    update_bytes += traffic.gradient_read_bytes + traffic.gradient_write_bytes
    disk = _seconds(update_bytes, rates.mixed_bytes_per_second)
    update = _seconds(traffic.host_updated_numel, rates.update_numel_per_second)
    fetch = _seconds(traffic.fetch_read_bytes, rates.read_bytes_per_second)
    copies = _seconds(copied_bytes, rates.copy_bytes_per_second)
    expected = None
    if disk is not None and update is not None and fetch is not None and copies is not None:
        expected = max(max(disk, update) + fetch, copies)
    return StepTime(disk, update, fetch, copies, expected)


def _seconds(amount: float, rate: float | None) -> float | None:
    return 0.0 if not amount else None if not rate else amount / rate


def _time_lines(traffic: StepTraffic, rates: Rates, seconds: StepTime) -> list[str]:
    def show(value: float | None) -> str:
        return "not known" if value is None else f"{value:.3f} s"

    read, written = format_bytes(traffic.nvme_read_bytes), format_bytes(traffic.nvme_write_bytes)
    lines = [
        f"a step: {read} read from NVMe, {written} written, {traffic.host_updated_numel:,} elements updated by the CPU",
        f"  updates: disk {show(seconds.update_disk_seconds)}, CPU {show(seconds.update_seconds)} (at the same time)",
        f"  fetches from NVMe: {show(seconds.fetch_seconds)}; copies: {show(seconds.copy_seconds)} (at the same "
        "time as the rest)",
        f"  all data movement: {show(seconds.expected_seconds)}, at the same time as the model's own computation, "
        "which is not timed here and may take longer",
    ]
    return lines + [f"  note: {note}" for note in rates.notes]


def _as_dict(plan: Plan, layout: Layout, traffic: StepTraffic, rates: Rates, seconds: StepTime) -> dict[str, Any]:
    return {
        "units": len(layout.units),
        "rows": [dataclasses.asdict(row) for row in plan.rows],
        "total_bytes": tier_sizes(plan),
        "limits": dataclasses.asdict(plan.limits),
        "step": {
            **dataclasses.asdict(traffic),
            "nvme_read_bytes": traffic.nvme_read_bytes,
            "nvme_write_bytes": traffic.nvme_write_bytes,
        },
        "rates": dataclasses.asdict(rates),
        "seconds": dataclasses.asdict(seconds),
        "notes": [*plan.notes, *rates.notes],
    }


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from None
