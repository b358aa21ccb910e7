"""State of a run besides its planes: counters, hyper-parameters, random states, buffers. Small, and for one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from offload.archives import bytes_tensor, make_archive, pack_any, read_archive, unpack_any
from offload.errors import ConfigError, StateError
from zero.optim.rules import Progress, Scalar
from zero.params.buffers import extra_states, set_extra_states
from zero.snapshots.run_state import rank_state, restore_counters, restore_groups, restore_rank

if TYPE_CHECKING:
    from zero.assembly.run import Run

REST, SMALL = "rest", "small states"
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def capture(run: Run, names: dict[int, str], norm: float | None) -> Callable[[], bytes]:
    """Capture the present state, in the form that `restore` takes. `names`: id(parameter) -> its first name.

    Returns a function that makes the bytes. It captures small states only when called, after the step's updates.
    """
    state: dict[str, Any] = {
        "counters": {name: getattr(run, name) for name in COUNTERS},
        "loss_scaler": run.scaler.state_dict(),
        "norm": norm,
        "groups": [],
        "step_counts": {},
        "progress": {},
        "rank": rank_state(run, None),
        "buffers": {name: buffer.detach().cpu() for name, buffer in run.module.named_buffers()},
    }
    if run.updater is not None:
        counts = run.updater.step_counts
        state["step_counts"] = {names[key]: count for key, count in counts.items() if key in names}
        state["progress"] = {names[key]: list(_packed(p)) for key, p in run.updater.progress.items() if key in names}
        for group in run.updater.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            state["groups"].append(pack_any({**options, "params": [names.get(id(p), "") for p in group["params"]]}))
    if hasattr(run.lr_scheduler, "state_dict"):
        state["lr_scheduler"] = pack_any(run.lr_scheduler.state_dict())
    if extra := extra_states(run.module):
        try:
            state["extra_states"] = pack_any(extra)
        except Exception as error:
            raise ConfigError(
                f"snapshot: the state that get_extra_state of a module returns ({', '.join(extra)}) cannot be "
                f"pickled: {type(error).__name__}: {error}; return plain values or tensors"
            ) from error
    archive = make_archive(state)

    def with_small() -> bytes:
        small = run.parts.small_states(names)
        whole = make_archive({REST: archive, SMALL: small}) if small else archive
        return whole.numpy().tobytes()

    return with_small


def check(run: Run, names: dict[int, str], data: bytes) -> None:
    """Raise StateError if the param groups are not the ones that `capture` has saved."""
    _check_groups(run, names, _opened(data)[2])


def _opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """(everything else, small states, param groups) from the bytes of `capture`."""
    state, small = read_archive(bytes_tensor(data), "the state of a snapshot"), {}
    if REST in state:
        small, state = state[SMALL], read_archive(state[REST], "the state of a snapshot")
    return state, small, [unpack_any(group, "the state of a snapshot") for group in state["groups"]]


def restore(run: Run, names: dict[int, str], data: bytes) -> float | None:
    """Restore the state of `capture`, after `check`; returns the norm of the last step's gradients."""
    state, small, groups = _opened(data)
    restore_counters(run, state["counters"])
    run.scaler.load_state_dict(state.get("loss_scaler"))
    if run.updater is not None:
        restore_groups(run.updater, groups)
        keys = {name: key for key, name in names.items()}
        run.updater.step_counts.clear()
        run.updater.step_counts.update({keys[name]: count for name, count in state["step_counts"].items()})
        run.updater.progress.clear()
        scalars = {name: like for rule in run.rules.each for name, like in rule.scalars.items()}
        run.updater.progress.update({keys[n]: _unpacked(p, scalars) for n, p in state["progress"].items()})
        run.updater.take_small(small, names)
    if "lr_scheduler" in state and hasattr(run.lr_scheduler, "load_state_dict"):
        # Classes are trusted, since a snapshot is of this very job, and its checksum was right.
        run.lr_scheduler.load_state_dict(unpack_any(state["lr_scheduler"], "the state of the scheduler"))
    buffers = dict(run.module.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
    if "extra_states" in state:
        set_extra_states(run.module, unpack_any(state["extra_states"], "the extra states of modules"))
    earlier = state.get("named_random_states", {})  # where snapshots had them before
    restore_rank(run, {"named": earlier, **state["rank"]}, own=True)
    norm: float | None = state["norm"]
    return norm


def _packed(progress: Progress) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """In types that an archive may hold: numbers, names of present planes, and names of numbers that are None."""
    numbers = {n: scalar.tensor() for n, scalar in progress.scalars if scalar.value is not None}
    return numbers, list(progress.present), [n for n, scalar in progress.scalars if scalar.value is None]


def _unpacked(packed: tuple[Any, ...], scalars: Mapping[str, Scalar]) -> Progress:
    numbers, present, *rest = packed
    known = [(n, scalars[n].like(value)) for n, value in numbers.items() if n in scalars]
    return Progress((*known, *((n, Scalar(None)) for n in (rest[0] if rest else []))), tuple(present))


def _check_groups(run: Run, names: dict[int, str], saved: list[dict[str, Any]]) -> None:
    groups = run.updater.param_groups if run.updater is not None else []
    mine = [[names.get(id(p), "") for p in group["params"]] for group in groups]
    theirs = [group["params"] for group in saved]
    if mine != theirs:
        sizes = [[len(group) for group in each] for each in (theirs, mine)]
        raise StateError(
            f"load_snapshot: the param groups differ: expected groups of {sizes[0]} parameters as in the snapshot, "
            f"got {sizes[1]}; make the optimizer with the same groups"
        )
