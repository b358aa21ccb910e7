"""Values for "auto": from the model, from the data, from other keys, or else the default; every choice is logged.

A client such as transformers fills most of them in before; the remaining ones are chosen here, once the model is known.
If nothing decides a value, the key counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.fields import short_json
from zero.config.known_keys import Key, known_keys
from zero.config.loading import value_at, with_auto_values
from zero.config.schema import AutoValue, Config

PREFETCH_SHARE = 0.9
PERSISTENT_ROWS = 10  # As in transformers: prefetch 0.9 h^2 elements, keep parameters below 10 h elements.
WARMUP_STEPS = 1000
WARMUP_SHARE = 0.1

ZERO = "zero_optimization."
SCHEDULER = "scheduler.params."
REDUCE_BUCKET, TOTAL_STEPS = f"{ZERO}reduce_bucket_size", f"{SCHEDULER}total_num_steps"
LINEAR = ("warmuplr", "warmupdecaylr")
ENDING = ("warmupdecaylr", "warmupcosinelr")
DEEPSPEED_DEFAULT = "DeepSpeed's default"


@dataclass(frozen=True)
class Facts:
    """Facts that decide the choices; None: not known."""

    hidden_numel: int | None = None  # The hidden size of a transformers config.
    dtype: torch.dtype | None = None  # The dtype of most trained elements.
    learning_rate: float | None = None  # Common to all groups of the optimizer that was passed.
    samples: int | None = None  # Number of samples in one pass over the training data.


def read_facts(model: nn.Module, optimizer: object = None, training_data: object = None) -> Facts:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    rates = {float(group["lr"]) for group in groups if group.get("lr") is not None}
    return Facts(
        hidden_size_of(getattr(model, "config", None)),
        _dtype_of(model.parameters()),
        rates.pop() if len(rates) == 1 else None,
        _length_of(training_data),
    )


def hidden_size_of(config: object) -> int | None:
    """The (largest) hidden size in a transformers config or in its text model's config."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            size = getattr(part, name, None)
            sizes = size if isinstance(size, (list, tuple)) else [size]
            known = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
            if known:
                return max(known)
    return None


def _dtype_of(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    counts: dict[tuple[bool, torch.dtype], int] = {}
    for parameter in parameters:
        if parameter.is_floating_point():
            key = (parameter.requires_grad, parameter.dtype)
            counts[key] = counts.get(key, 0) + parameter.numel()
    # Trained parameters decide, even if more are frozen: the dtype of a quantised base says little.
    return max(counts, key=lambda key: (key[0], counts[key]))[1] if counts else None


def _length_of(training_data: object) -> int | None:
    try:
        return len(training_data)  # type: ignore[arg-type]
    except TypeError:
        return None


def resolve_auto(config: Config, facts: Facts) -> Config:
    """The configuration with a value for each "auto" that the facts decide.

    Raises ConfigError: a chosen value contradicts a key that the user gave.
    """
    still_open = {key.path for key in _auto_keys(config)} - set(config.auto_values)
    chosen = {path: choice for path, choice in _choices(config, facts, still_open) if path in still_open}
    return with_auto_values(config, chosen) if chosen else config


def auto_lines(config: Config) -> Iterator[str]:
    """A line "auto: path = value (from ...)" for every acting key that was "auto"."""
    autos = list(_auto_keys(config))
    effective = config.as_dict() if autos else {}
    for key in autos:
        if key.path in config.auto_values:
            chosen = config.auto_values[key.path]
            yield f"auto: {key.path} = {short_json(chosen.value)} (from {chosen.source})"
            continue
        value = value_at(effective, key.path)
        if key.path in (TRAIN, MICRO, STEPS):
            product = " x ".join(str(getattr(config, name)) for name in (MICRO, STEPS))
            source = f"{config.train_batch_size} samples = {product} x {_format_ranks(config)}"
            yield f"auto: {key.path} = {value} (from {source})"
        elif value is None:
            yield f"auto: {key.path} is left to the engine (as without the key)"
        elif key.means_auto:
            yield f"auto: {key.path} is the memory that is free when the plan is made"
        else:
            yield f"auto: {key.path} = {short_json(value)} (the default)"


def _format_ranks(config: Config) -> str:
    return "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"


def _auto_keys(config: Config) -> Iterator[Key]:
    """Keys that are "auto" in the source, hold a value and no block, and act or have a value chosen all the same."""
    auto_paths = {path for path, origin in config.origins.items() if origin == "auto"}
    for key in known_keys(Config) if auto_paths else ():  # there are hundreds
        if key.path in auto_paths and key.inner is None and (key.role != "inert" or key.path == REDUCE_BUCKET):
            yield key


# ---- what facts decide, key by key --------------------------------------------------------------


def _choices(config: Config, facts: Facts, still_open: Collection[str]) -> Iterator[tuple[str, AutoValue]]:
    """Path and value of each key that the facts decide. `still_open`: paths of the keys that are to be chosen."""
    # Without the key there is no clipping; but "auto" asks for a value, so it gets one that clips, as from clients.
    yield "gradient_clipping", AutoValue(1.0, DEEPSPEED_DEFAULT)
    if facts.dtype is not None:
        yield "bf16.enabled", _precision(facts.dtype, torch.bfloat16, "fp16", other_enabled=config.fp16.enabled)
        yield "fp16.enabled", _precision(facts.dtype, torch.float16, "bf16", other_enabled=config.bf16.enabled)
    hidden = facts.hidden_numel
    if hidden is not None:
        yield REDUCE_BUCKET, AutoValue(hidden * hidden, f"h x h, hidden size {hidden}")
    if hidden is not None and config.zero_optimization.stage == 3:
        ahead = AutoValue(int(PREFETCH_SHARE * hidden * hidden), f"0.9 x h x h, hidden size {hidden}")
        yield f"{ZERO}stage3_prefetch_bucket_size", ahead
        persistent = AutoValue(PERSISTENT_ROWS * hidden, f"10 x h, hidden size {hidden}")
        yield f"{ZERO}stage3_param_persistence_threshold", persistent
    kind = "" if config.scheduler is None else str(config.scheduler.type).lower()
    if kind in LINEAR:
        yield f"{SCHEDULER}warmup_min_lr", AutoValue(0.0, DEEPSPEED_DEFAULT)
        if (rate := _largest_rate(config, facts)) is not None:
            yield f"{SCHEDULER}warmup_max_lr", rate
    total: float | None = getattr(getattr(config.scheduler, "params", None), "total_num_steps", None)
    if kind in ENDING and facts.samples is not None:
        steps = _all_steps(config, facts.samples)
        yield TOTAL_STEPS, steps
        total = steps.value if total is None and TOTAL_STEPS in still_open else total
    if kind in (*LINEAR, *ENDING):
        yield f"{SCHEDULER}warmup_num_steps", _warmup_steps(total)


def _precision(model: torch.dtype, wanted: torch.dtype, other: str, *, other_enabled: bool) -> AutoValue:
    """Whether weights are in the dtype `wanted`: if the model is, unless the `other` block is enabled."""
    source = f"{other}.enabled" if other_enabled else f"the model, which is {str(model).removeprefix('torch.')}"
    return AutoValue(model == wanted and not other_enabled, source)


def _largest_rate(config: Config, facts: Facts) -> AutoValue | None:
    if facts.learning_rate is not None:
        return AutoValue(facts.learning_rate, "the learning rate of the optimizer")
    user_keys = frozenset[str]() if config.optimizer is None else config.optimizer.user_keys
    if config.optimizer is None or "lr" not in user_keys or user_keys & {"muon_lr", "adam_lr"}:
        return None  # each group's own
    return AutoValue(float(config.optimizer.params.lr), "optimizer.params.lr")


def _all_steps(config: Config, samples: int) -> AutoValue:
    batches = samples / config.train_batch_size
    steps = math.floor(batches) if config.dataloader_drop_last else math.ceil(batches)
    return AutoValue(max(1, steps), f"one pass over training_data, {samples} samples; for more passes give a number")


def _warmup_steps(total: float | None) -> AutoValue:
    most = WARMUP_STEPS if total is None else max(1, int(WARMUP_SHARE * total))
    if most >= WARMUP_STEPS:
        return AutoValue(WARMUP_STEPS, DEEPSPEED_DEFAULT)
    return AutoValue(most, f"a tenth of {int(total or 0)} steps")
