"""What a run is beside its planes: counters, hyper-parameters, random states, buffers. Small, and of one rank."""

from __future__ import annotations

import io
import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from offload.errors import StateError
from zero.optim.optimizer import ZeroOptimizer
from zero.rng_tracker import get_cuda_rng_tracker


class Run(Protocol):
    """What is captured, of an engine."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    device: torch.device
    global_steps: int
    micro_steps: int


def capture(run: Run, names: dict[int, str], norm: float | None) -> bytes:
    """All of it, as `restore` takes it.

    Args:
        run: the engine.
        names: id(parameter) -> its first name.
        norm: of the last step's gradients.
    """
    state: dict[str, Any] = {
        "counters": {"global_steps": run.global_steps, "micro_steps": run.micro_steps},
        "norm": norm,
        "groups": [],
        "step_counts": {},
        "random": _random_states(run.device),
        "buffers": {name: buffer.detach().cpu() for name, buffer in run.module.named_buffers()},
    }
    if run.optimizer is not None:
        counts = run.optimizer.step_counts
        state["step_counts"] = {names[key]: count for key, count in counts.items() if key in names}
        for group in run.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            state["groups"].append({**options, "params": [names.get(id(p), "") for p in group["params"]]})
    # What schedulers and loaders keep may be any object: it is packed for itself.
    others = {"lr_scheduler": run.lr_scheduler, "data": run.training_dataloader}
    kept = {name: other.state_dict() for name, other in others.items() if hasattr(other, "state_dict")}
    return _packed({**state, "objects": _packed(kept)})


def restore(run: Run, names: dict[int, str], data: bytes) -> float | None:
    """Put back what `capture` has taken; returns the norm of the last step's gradients.

    Raises:
        StateError: the param groups are others. Nothing has changed.
    """
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    _check_groups(run, names, state["groups"])
    run.global_steps, run.micro_steps = state["counters"]["global_steps"], state["counters"]["micro_steps"]
    if run.optimizer is not None:
        for group, saved in zip(run.optimizer.param_groups, state["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        keys = {name: key for key, name in names.items()}
        run.optimizer.step_counts.clear()
        run.optimizer.step_counts.update({keys[name]: count for name, count in state["step_counts"].items()})
    # A snapshot is of this very job, in files that only its user can write, and its checksum was right.
    kept = torch.load(io.BytesIO(state["objects"]), map_location="cpu", weights_only=False)
    for name, other in {"lr_scheduler": run.lr_scheduler, "data": run.training_dataloader}.items():
        if name in kept and hasattr(other, "load_state_dict"):
            other.load_state_dict(kept[name])
    buffers = dict(run.module.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
    _set_random_states(run.device, state["random"])
    norm: float | None = state["norm"]
    return norm


def _packed(state: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def _check_groups(run: Run, names: dict[int, str], saved: list[dict[str, Any]]) -> None:
    groups = run.optimizer.param_groups if run.optimizer is not None else []
    mine = [[names.get(id(p), "") for p in group["params"]] for group in groups]
    theirs = [group["params"] for group in saved]
    if mine != theirs:
        sizes = [[len(group) for group in each] for each in (theirs, mine)]
        raise StateError(
            f"load_snapshot: the param groups are others: expected groups of {sizes[0]} parameters as they were saved, "
            f"got {sizes[1]}; make the optimizer as it was"
        )


def _random_states(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "named": get_cuda_rng_tracker().get_states(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(device: torch.device, states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["named"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
