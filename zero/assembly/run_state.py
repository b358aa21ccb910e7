"""State of an engine besides its tiered arrays: counters, hyper-parameters, random states, the position in the data.

[Note: three parts] The state that is common to all ranks; the state of each rank; and objects of users and schedulers,
which may be any picklable objects. The first two consist of types that torch.load(weights_only=True) accepts: other
objects in a rank's state are packed. Objects that torch's weights-only loader refuses are made only where a user
allows it (`checkpoint.allow_pickle`). A snapshot has the state of its rank alone, in one archive.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from offload.accelerator import compute_device, is_accelerator, rng_state, set_rng_state
from offload.errors import ConfigError
from offload.files.archives import bytes_tensor, make_archive, pack_any, read_archive, unpack_any
from offload.system.regular_files import report_read_errors
from zero.assembly.run import Run
from zero.optim.optimizer import ZeroOptimizer, check_flags
from zero.params.buffers import extra_states, pack_extra_states, persistent_buffers, set_extra_states
from zero.store.rng_tracker import get_cuda_rng_tracker

logger = logging.getLogger("zero")

OTHER_STATE, SMALL = "rest", "small states"
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def common_state(engine: Run) -> dict[str, Any]:
    """The common part of all ranks."""
    parts, config = engine.parts, engine.config
    leaves, trained = parts.leaves, parts.trained_indices
    dtype_of = {slot.index: str(unit.dtype) for unit in parts.layout.units for slot in unit.slots}
    return {
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "step_began": engine.step_began,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "forwards": getattr(engine.module, "micro_offset", None),
        "loss_scaler": engine.scaler.state_dict(),
        "groups": [] if engine.updater is None else param_groups_state(engine.updater, parts.names),
        "config": _to_plain(config.as_dict()),
        "origins": dict(config.origins),
        "parameters": [leaf.names[0] for leaf in leaves],
        "aliases": {name: leaf.names[0] for leaf in leaves for name in leaf.names[1:]},
        "dtypes": {leaves[index].names[0]: dtype.removeprefix("torch.") for index, dtype in dtype_of.items()},
        "frozen": [leaf.names[0] for leaf in leaves if leaf.index not in trained],
        "buffers": list(persistent_buffers(parts.model)),
    }


def rank_state(engine: Run, accumulated: dict[str, Any] | None) -> dict[str, Any]:
    """The part of one rank: random states, the position in its data, and its gradients of an incomplete step."""
    loader: Any = engine.training_dataloader
    logits, scheduler_state = engine.attention_logits, {}
    if engine.parts.collectives.is_pipeline_stage:
        names = [leaf.names[0] for leaf in engine.parts.leaves]
        scheduler_state["lr_scheduler"] = names, pack_any(_scheduler_state(engine))
    return {
        **scheduler_state,
        "rng": random_state(engine.device),
        "named": get_cuda_rng_tracker().get_states(),
        "data": pack_any(loader.state_dict() if hasattr(loader, "state_dict") else None),
        "accumulated": accumulated,
        **({} if logits is None else {"attention_logits": logits.state_dict()}),
    }


def client_objects(engine: Run, client_state: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part that may consist of any objects. `extra`: extra states of all stages; None: there are no stages."""
    return {
        "client_state": dict(client_state),
        "extra_states": extra_states(engine.module) if extra is None else dict(extra),
        "lr_scheduler": _scheduler_state(engine),
    }


def _scheduler_state(engine: Run) -> Any:
    scheduler = engine.lr_scheduler
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else None


def restore_counters(engine: Run, state: Mapping[str, Any]) -> None:
    """An incomplete step continues where it was, also if its gradients had been discarded (`zero_grad`)."""
    engine.global_steps, engine.micro_steps = int(state["global_steps"]), int(state["micro_steps"])
    began, is_accumulating = engine.micro_steps, state.get("accumulating") is not None
    # For checkpoints from before `step_began` existed: there every step had the same number of micro-batches.
    if is_accumulating:
        began -= engine.micro_steps % int(state["config"]["gradient_accumulation_steps"])
    engine.step_began = int(state.get("step_began", began))
    engine.collecting_began = engine.step_began if is_accumulating else engine.micro_steps
    engine.global_samples = int(state.get("global_samples", 0))
    engine.skipped_steps = int(state.get("skipped_steps", 0))
    if state.get("forwards") is not None and hasattr(engine.module, "micro_offset"):
        setattr(engine.module, "micro_offset", int(state["forwards"]))  # noqa: B010 - a pipeline's, which seeds its layers


def data_position(state: Mapping[str, Any], *, trusted: bool) -> Any:
    """The position in the data in a rank's state. Raises ConfigError as `unpack_any`."""
    return unpack_any(state["data"], "the position in the data", trusted=trusted)


def restore_rank(engine: Run, state: Mapping[str, Any], position: Any, *, own: bool) -> None:
    """Restore random states and the position in the data. Raises ConfigError: the loader does not take the position.

    `engine`: its `training_dataloader` gets the position. `position`: see `data_position`. `own`: `state` is of this
    rank; False: only the position is restored.
    """
    if own:
        with report_read_errors("the random states of a rank"):
            restore_random_state(state["rng"], engine.device)
        tracker, nbytes = get_cuda_rng_tracker(), rng_state(compute_device()).numel()
        fitting = {name: saved for name, saved in state.get("named", {}).items() if saved.numel() == nbytes}
        tracker.set_states({**tracker.get_states(), **fitting})  # states of another kind of device cannot go on here
    if engine.attention_logits is not None:
        engine.attention_logits.load_state_dict(state.get("attention_logits", {}) if own else {})
    loader: Any = engine.training_dataloader
    engine.data_position = position
    if position is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(position)
    elif position is not None:
        logger.warning(
            "load_checkpoint: the checkpoint has a position in the data, but the engine %s, so the position is not "
            "restored. To continue from it, set engine.training_dataloader before loading, or call "
            "load_state_dict(engine.data_position) of your loader",
            "has no loader" if loader is None else f"has a {type(loader).__name__} without load_state_dict",
        )
    elif hasattr(loader, "load_state_dict"):
        logger.warning(
            "load_checkpoint: the checkpoint has no position in the data, so the position of the data loader is not "
            "changed"
        )


def check_groups(
    optimizer: ZeroOptimizer, saved: list[dict[str, Any]], name_of: Mapping[int, str], what: str, where: str
) -> None:
    """Raise ConfigError unless the param groups have the same parameters as the saved ones, but for frozen ones.

    `what`, `where`: the call and its source, for the error.
    """
    live = [[p for p in group["params"] if id(p) in name_of] for group in optimizer.param_groups]
    frozen = {name_of[id(p)] for group in live for p in group if not p.requires_grad}  # DeepSpeed saves none
    live_names = [[name_of[id(p)] for p in group if p.requires_grad] for group in live]
    saved_names = [[name for name in group["params"] if name not in frozen] for group in saved]
    if [set(names) for names in live_names] == [set(names) for names in saved_names]:
        check_flags(optimizer, saved, what, where)
        return
    fix = "make the same groups" + ", or pass load_optimizer_states=False" * (what == "load_checkpoint")
    if len(live_names) != len(saved_names):
        raise ConfigError(
            f"{what}: expected {len(saved_names)} param groups as in {where}, got {len(live_names)}; {fix}"
        )
    for number, pair in enumerate(zip(live_names, saved_names, strict=True)):
        here, there = set(pair[0]), set(pair[1])
        more, less = sorted(here - there), sorted(there - here)
        if more or less:
            raise ConfigError(
                f"{what}: param group {number} of the optimizer differs from {where}: only the optimizer has "
                f"{more[:3] or 'nothing'}, only {where} has {less[:3] or 'nothing'}; {fix}"
            )


# Whether they are set decides which states exist, or which rule is used. If that differs, the live values stay.
STRUCTURAL_OPTIONS = ("momentum", "centered", "amsgrad", "decoupled")


def restore_groups(optimizer: ZeroOptimizer, saved: list[dict[str, Any]]) -> None:
    """Restore hyper-parameters, except `STRUCTURAL_OPTIONS`; the live groups and their lists stay the same objects."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            live = group.get(key)
            is_repr = isinstance(value, str) and not (live is None or isinstance(live, str))  # once saved by its repr
            is_structural = key in STRUCTURAL_OPTIONS and bool(value) != bool(live)
            if key != "params" and not is_repr and not is_structural:
                group[key] = tuple(value) if isinstance(live, tuple) else value


def random_state(device: torch.device) -> dict[str, Any]:
    """Random states of Python, numpy and torch, on the CPU and the device."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        state["device"] = rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *gauss_state = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *gauss_state))
    torch.set_rng_state(state["torch"])
    if is_accelerator(device) and "device" in state:
        set_rng_state(state["device"], device)


def param_groups_state(optimizer: ZeroOptimizer, name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """The param groups, with the names of their parameters. `name_of`: id(parameter) -> its first name."""
    return [
        {
            # Options of other types are not saved: a load leaves those of the live group.
            **{key: _to_plain(value) for key, value in group.items() if key != "params" and _is_plain(value)},
            "params": [name_of[id(p)] for p in group["params"] if id(p) in name_of],
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    """True if `_to_plain` can represent the value without its repr."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    plain = value is None or isinstance(value, (bool, int, float, str, np.generic, torch.Tensor))
    return plain and not isinstance(value, Enum)


def _to_plain(value: Any) -> Any:
    """The value in plain types, which any reader accepts; a value of another type becomes its repr."""
    if isinstance(value, np.generic):  # a schedule made with numpy leaves its numbers in the param groups
        value = value.item()
    if value is None or isinstance(value, torch.Tensor):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return repr(value)


# ---- snapshots --------------------------------------------------------------------------------------


class CapturedState:
    """The state of a run at one step, in the form that `restore_state` takes. `norm`: of the step's gradients."""

    def __init__(self, run: Run, norm: float | None) -> None:
        names = run.parts.names
        state: dict[str, Any] = {
            "counters": {name: getattr(run, name) for name in COUNTERS},
            "loss_scaler": run.scaler.state_dict(),
            "norm": norm,
            "groups": [],
            "step_counts": {},
            "numbers": {},
            "rank": rank_state(run, None),
            "buffers": {name: buffer.detach().cpu() for name, buffer in run.module.named_buffers()},
        }
        if (optimizer := run.updater) is not None:
            state["groups"] = param_groups_state(optimizer, names)
            state["step_counts"] = {names[key]: count for key, count in optimizer.step_counts.items() if key in names}
            for key in optimizer.progress.keys() & names.keys():  # not of Adam: a tensor for each parameter takes time
                numbers = optimizer.saved_numbers(key)
                state["numbers"][names[key]] = {what: number.to_tensor() for what, number in numbers.items()}
        if hasattr(run.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = pack_any(run.lr_scheduler.state_dict())
        if (extra := pack_extra_states(run.module, "snapshot")) is not None:
            state["extra_states"] = extra
        self._run, self._names, self._archive = run, names, make_archive(state)

    def to_bytes(self) -> bytes:
        """With the small states as they are now: call it after the step's updates."""
        small = self._run.parts.small_states(self._names)
        if not small:
            return self._archive
        return make_archive({OTHER_STATE: bytes_tensor(self._archive), SMALL: small})


def check_state(run: Run, data: bytes) -> None:
    """Raise ConfigError if the param groups are not those that `CapturedState` has saved, or an object is refused."""
    state = _read_state(data)[0]
    if run.updater is not None:
        check_groups(run.updater, state["groups"], run.parts.names, "load_snapshot", "the snapshot")
    _unpack_objects(run, state)


def _unpack_objects(run: Run, state: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The states of the scheduler and of modules, and the position in the data, which may be of any class."""
    trusted = run.config.checkpoint.allow_pickle
    scheduler = unpack_any(state.get("lr_scheduler"), "the state of the scheduler in a snapshot", trusted=trusted)
    extra = unpack_any(state.get("extra_states", {}), "the extra states of modules in a snapshot", trusted=trusted)
    return scheduler, extra, data_position(state["rank"], trusted=trusted)


def _read_state(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """(everything else, small states) from the bytes of a `CapturedState`."""
    state = read_archive(data, "the state of a snapshot")
    if OTHER_STATE in state:
        return read_archive(state[OTHER_STATE], "the state of a snapshot"), state[SMALL]
    return state, {}


def restore_state(run: Run, data: bytes) -> float | None:
    """Restore the state of a `CapturedState`, after `check_state`; returns the norm of the last step's gradients."""
    state, small = _read_state(data)
    scheduler, extra, position = _unpack_objects(run, state)
    names = run.parts.names
    restore_counters(run, state["counters"])
    run.scaler.load_state_dict(state.get("loss_scaler"))
    if (optimizer := run.updater) is not None:
        restore_groups(optimizer, state["groups"])
        for key, name in names.items():
            optimizer.forget_parameter(key)
            if name in state["numbers"]:
                optimizer.set_numbers(key, state["numbers"][name])
            elif name in state["step_counts"]:
                optimizer.step_counts[key] = state["step_counts"][name]
        optimizer.load_small(small, names)
    if "lr_scheduler" in state and hasattr(run.lr_scheduler, "load_state_dict"):
        run.lr_scheduler.load_state_dict(scheduler)
    buffers = dict(run.module.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
    set_extra_states(run.module, extra)
    restore_rank(run, state["rank"], position, own=True)
    norm: float | None = state["norm"]
    return norm
