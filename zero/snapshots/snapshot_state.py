"""State of a run besides its tiered arrays: counters, hyper-parameters, random states, buffers; of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from offload.archives import bytes_tensor, make_archive, pack_any, read_archive, unpack_any
from zero.params.buffers import pack_extra_states, set_extra_states
from zero.snapshots.run_state import (
    check_groups,
    data_position,
    param_groups_state,
    rank_state,
    restore_counters,
    restore_groups,
    restore_rank,
)

if TYPE_CHECKING:
    from zero.assembly.run import Run

OTHER_STATE, SMALL = "rest", "small states"
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def capture_state(run: Run, norm: float | None) -> Callable[[], bytes]:
    """Capture the present state, in the form that `restore_state` takes.

    Returns a function that makes the bytes. It captures small states only when called, after the step's updates.
    """
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
    archive = make_archive(state)

    def make_bytes() -> bytes:
        small = run.parts.small_states(names)
        return make_archive({OTHER_STATE: bytes_tensor(archive), SMALL: small}) if small else archive

    return make_bytes


def check_state(run: Run, data: bytes) -> None:
    """Raise ConfigError if the param groups are not those that `capture_state` has saved, or an object is refused."""
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
    """(everything else, small states) from the bytes of `capture_state`."""
    state = read_archive(data, "the state of a snapshot")
    if OTHER_STATE in state:
        return read_archive(state[OTHER_STATE], "the state of a snapshot"), state[SMALL]
    return state, {}


def restore_state(run: Run, data: bytes) -> float | None:
    """Restore the state of `capture_state`, after `check_state`; returns the norm of the last step's gradients."""
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
