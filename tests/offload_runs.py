"""Common code of the tests of `OffloadOptimizer`: a plain torch loop for any optimizer, and optimizers to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiled_optimizers import Patchy, batch, in_groups, patchy
from torch import Tensor, nn

import zero

DEVICES = ("cpu", "nvme")
SUB_GROUP_NUMEL = 8192
"""With this size, parameters of the model are split over sub-groups, and several parameters share one."""


def offloaded(device: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {"device": device, "nvme_path": str(folder), "sub_group_size": SUB_GROUP_NUMEL, **more}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return in_groups(list(model.named_parameters()), {"weight_decay": 0.0, "lr": 3e-3})


def backward(model: nn.Module, index: int, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    """Backward for one branch of the model; its idle layer never has gradients."""
    dtype = next(model.parameters()).dtype
    scale(model(batch(index, False).to(dtype), index % 3 % 2)).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, schedule: Any = None, clip: float = 0.5
) -> None:
    for index in steps:
        backward(model, index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()


def same(first: nn.Module, second: nn.Module) -> list[str]:
    """Names of the parameters that differ in any bit."""
    pairs = zip(first.named_parameters(), second.parameters(), strict=True)
    return [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]


def state_differences(first: dict[str, Any], second: dict[str, Any], *, but: tuple[str, ...] = ()) -> list[str]:
    """The differences between two `state_dict`s."""
    found = [] if first["param_groups"] == second["param_groups"] else ["param_groups"]
    if first["state"].keys() != second["state"].keys():
        return [*found, "parameters"]
    for key, mine in first["state"].items():
        theirs = {name: value for name, value in second["state"][key].items() if name not in but}
        if mine.keys() != theirs.keys():
            found.append(f"names of {key}")
        found += [f"{key}/{n}" for n in mine.keys() & theirs.keys() if not torch.equal(mine[n], theirs[n])]
    return found


@contextmanager
def both(
    device: str, folder: Path, kind: Any = torch.optim.AdamW, **options: Any
) -> Iterator[tuple[Patchy, torch.optim.Optimizer, Patchy, Any]]:
    """(model, torch's optimizer, an equal model, ours)."""
    expected, model = patchy(), patchy()
    plain = kind(groups_of(expected), **options)
    with zero.OffloadOptimizer(groups_of(model), kind, offload=offloaded(device, folder), **options) as ours:
        yield expected, plain, model, ours
