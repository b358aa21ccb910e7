"""DeepSpeed's checkpoints of stage 0: one file has the module and the optimizer's state dict, unsharded.

In fp32 that is the state dict of the torch optimizer, and the module has the weights. In fp16 and bf16 there are fp32
masters besides: flattened group by group (`fp32_groups_flat`, whose states are flat too), or one for each parameter
(`fp32_groups`).

[Note: names] No parameter is named: states belong to the parameters of the param groups by position, so they need the
optimizer that continues with them. Without one, masters are found by their values, which the module has in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import FileTensor, TorchFile
from zero.checkpoint.dcp_format import MODEL, STEP, state_name
from zero.checkpoint.deepspeed_files import KINDS, UNSHARDED_FILE, Contents, group_steps, require, to_int
from zero.checkpoint.deepspeed_values import (
    EXTRA_STATE_SUFFIX,
    ConstantTensor,
    FoundTensors,
    ShardedTensor,
    TrainedParameters,
    groups_with_names,
    unsharded_tensor,
)

FLAT_MASTERS, SEPARATE_MASTERS = "fp32_groups_flat", "fp32_groups"
PROBED_NUMEL = 2048  # Elements at each end of a parameter that are compared with the module's.
GROUPS_ADVICE = "make the param groups of the run that saved, in the same order"
NO_STATES_ADVICE = "or pass load_optimizer_states=False"


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """The optimizer in a file. `masters`: for each param group; None: the module's weights are the masters."""

    file: TorchFile
    state: Mapping[int, Contents]
    groups: Sequence[Contents]
    masters: Sequence[Sequence[torch.Tensor]] | None
    is_flat: bool
    steps: Sequence[int]


def read_stage0(folder: Path, groups: Sequence[Sequence[str]] | None) -> TrainedParameters | None:
    """What a checkpoint of stage 0 has; None: its optimizer was sharded, and the files of its states are missing.

    Raises ConfigError: the file is missing or damaged, it is a checkpoint of a pipeline, or `groups` (the names in each
    param group; None: there is no optimizer) are not those of the optimizer that was saved.
    """
    file = TorchFile(folder / UNSHARDED_FILE, "the model states of stage 0")
    require(file, "module", "buffer_names", "global_steps", "skipped_steps")
    head, module = file.contents, file.contents["module"]
    if module is None:
        raise ConfigError(f"{file.path}: it has no module: checkpoints of DeepSpeed's pipelines cannot be read")
    if head.get("param_shapes") is not None:
        return None
    left_out = set(head["buffer_names"])
    aliases = _tied_names(file, {name: value for name, value in module.items() if name not in left_out})
    weights = {
        name: value
        for name, value in module.items()
        if isinstance(value, torch.Tensor)
        and name not in left_out | aliases.keys()
        and not name.endswith(EXTRA_STATE_SUFFIX)
    }
    optimizer = None if head.get("optimizer") is None else _read_optimizer(file)
    if optimizer is not None and groups is not None:
        groups = [[aliases.get(name, name) for name in names] for names in groups]
        _check_names(file.path, optimizer, groups, weights)
    elif optimizer is not None and optimizer.masters is not None:
        groups = _names_by_value(file.path, optimizer, weights)
    if optimizer is None or groups is None:
        tensors: FoundTensors = {
            MODEL + name: (value.shape, unsharded_tensor(file, value)) for name, value in weights.items()
        }
        return TrainedParameters(tensors, list(weights), [], aliases, 0, [file], None)
    tensors = {}
    for place, names in enumerate(groups):
        tensors.update(_group_values(optimizer, place, names, weights))
    options = [{**group, "params": [place]} for place, group in enumerate(optimizer.groups)]
    named_groups = groups_with_names(options, file.path, groups)
    trained = [name for names in groups for name in names]
    return TrainedParameters(tensors, trained, named_groups, aliases, 0, [file], _loss_scaler(head["optimizer"]))


def _tied_names(file: TorchFile, module: Mapping[str, Any]) -> dict[str, str]:
    """Tied name -> first name: tensors that share their elements in the file."""
    first: dict[tuple[FileTensor, torch.Size], str] = {}
    ties = {}
    for name, value in module.items():
        if isinstance(value, torch.Tensor) and value.numel():
            first_name = first.setdefault((file.locate(value), value.shape), name)
            if first_name != name:
                ties[name] = first_name
    return ties


def _read_optimizer(file: TorchFile) -> _Optimizer:
    saved: Contents = file.contents["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    masters = next((saved[key] for key in (FLAT_MASTERS, SEPARATE_MASTERS) if key in saved), None)
    if not {"state", "param_groups"} <= inner.keys() or (inner is not saved and masters is None):
        raise ConfigError(
            f"{file.path}: optimizer: expected the state dict of a torch optimizer, alone or with {FLAT_MASTERS} or "
            f"{SEPARATE_MASTERS}, got {', '.join(map(str, saved))}; save the weights with DeepSpeed's "
            "save_16bit_model and begin from them"
        )
    is_flat = FLAT_MASTERS in saved
    if is_flat:
        masters = [[master] for master in saved[FLAT_MASTERS]]
    groups = [{**group, "params": [place]} for place, group in enumerate(inner["param_groups"])]
    global_step = to_int(file.contents["global_steps"]) - to_int(file.contents["skipped_steps"])
    steps = [global_step if step is None else step for step in group_steps(groups, len(groups), None)]
    return _Optimizer(file, inner["state"], inner["param_groups"], masters, is_flat, steps)


def _check_names(
    path: Path, optimizer: _Optimizer, groups: Sequence[Sequence[str]], weights: Mapping[str, torch.Tensor]
) -> None:
    if len(groups) != len(optimizer.groups):
        raise ConfigError(
            f"{path}: expected {len(optimizer.groups)} param groups as in the checkpoint, got {len(groups)}; "
            f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
        )
    unknown = [name for names in groups for name in names if name not in weights]
    if unknown:
        raise ConfigError(
            f"{path}: the optimizer has {', '.join(unknown[:3])}, which the checkpoint's module lacks; build the model "
            f"that was saved, {NO_STATES_ADVICE}"
        )


def _group_values(
    optimizer: _Optimizer, place: int, names: Sequence[str], weights: Mapping[str, torch.Tensor]
) -> FoundTensors:
    """Weights, states and step counts of a param group."""
    tensors: FoundTensors = {}
    numbers = list(optimizer.groups[place]["params"])
    if optimizer.is_flat:
        master, first = optimizer.masters[place][0], 0  # type: ignore[index]
        total = sum(weights[name].numel() for name in names)
        if total != master.numel():
            raise ConfigError(
                f"{optimizer.file.path}: param group {place}: expected {master.numel():,} elements as in the "
                f"checkpoint, got {total:,}; {GROUPS_ADVICE}, {NO_STATES_ADVICE}"
            )
        for name in names:
            tensors.update(_values(optimizer, place, name, weights[name], master, numbers[0], first))
            first += weights[name].numel()
        return tensors
    if len(numbers) != len(names):  # DeepSpeed may have listed frozen parameters too
        numbers = [index for index in numbers if index in optimizer.state]
    if len(numbers) != len(names) and optimizer.state:
        raise ConfigError(
            f"{optimizer.file.path}: param group {place}: expected {len(numbers)} parameters as in the checkpoint, "
            f"got {len(names)}; {GROUPS_ADVICE}, {NO_STATES_ADVICE}"
        )
    for position, name in enumerate(names):
        master = weights[name] if optimizer.masters is None else optimizer.masters[place][position]
        index = numbers[position] if position < len(numbers) else -1
        tensors.update(_values(optimizer, place, name, weights[name], master, index, 0))
    return tensors


def _values(
    optimizer: _Optimizer, place: int, name: str, weight: torch.Tensor, master: torch.Tensor, index: int, first: int
) -> FoundTensors:
    """A parameter's master, states and step count; it begins at element `first` of its master's and states' tensors.

    Raises ConfigError: they are those of another parameter.
    """
    file, shape = optimizer.file, weight.shape
    state = optimizer.state.get(index, {})
    tensors = {str(kind): value for kind, value in state.items() if kind != STEP and isinstance(value, torch.Tensor)}
    expected_shape = master.shape if optimizer.is_flat else shape
    for value in (master, *(tensors[kind] for kind in KINDS if kind in tensors)):
        if value.shape != expected_shape:
            raise ConfigError(
                f"{file.path}: {name}: expected shape {tuple(expected_shape)}, got {tuple(value.shape)}; "
                f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
            )
    states = {kind: value for kind, value in tensors.items() if value.shape == expected_shape}
    if optimizer.masters is not None and not _may_round_to(weight, master, first):
        raise ConfigError(
            f"{file.path}: {name}: its fp32 values in param group {place} are not those of the module; "
            f"{GROUPS_ADVICE}, {NO_STATES_ADVICE}"
        )

    def locate(tensor: torch.Tensor) -> ShardedTensor:
        return ShardedTensor([file.locate(tensor)], max(tensor.numel(), 1), torch.float32, first)

    values: FoundTensors = {MODEL + name: (shape, locate(master))}
    values.update({state_name(name, kind): (shape, locate(value)) for kind, value in states.items()})
    if states:
        step = to_int(state[STEP]) if STEP in state else optimizer.steps[place]
        values[state_name(name, STEP)] = torch.Size(), ConstantTensor(step, torch.int64)
    return values


def _may_round_to(weight: torch.Tensor, master: torch.Tensor, first: int) -> bool:
    """True if the module's weight may be the elements of the master from `first` on, by the elements at both ends."""
    flat, numel = weight.reshape(-1), weight.numel()
    exact = master.detach().reshape(-1)[first : first + numel]
    ends = (slice(0, PROBED_NUMEL), slice(max(numel - PROBED_NUMEL, 0), numel))
    return exact.numel() == numel and all(
        torch.equal(torch.nan_to_num(exact[end].to(flat.dtype)), torch.nan_to_num(flat[end])) for end in ends
    )


def _names_by_value(path: Path, optimizer: _Optimizer, weights: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each group's parameters; of several that fit, the largest, then the first in the model."""
    by_first: dict[float, list[str]] = {}
    for name, weight in weights.items():
        if weight.numel():
            by_first.setdefault(float(weight.reshape(-1)[0]), []).append(name)
    groups: list[list[str]] = []
    for place, masters in enumerate(optimizer.masters or ()):
        groups.append([])
        for master in masters:
            flat, first = master.detach().reshape(-1), 0
            while first < flat.numel():
                fitting = [
                    name
                    for dtype in {weight.dtype for weight in weights.values()}
                    for name in by_first.get(float(flat[first].to(dtype)), ())
                    if weights[name].dtype == dtype and _may_round_to(weights[name], master, first)
                ]
                if not fitting:
                    raise ConfigError(
                        f"{path}: the fp32 values of param group {place} are not those of the module from element "
                        f"{first:,} on, and DeepSpeed saves no names at stage 0: load the checkpoint with an engine "
                        "whose optimizer has the same param groups"
                    )
                name = max(fitting, key=lambda candidate: weights[candidate].numel())
                by_first[float(weights[name].reshape(-1)[0])].remove(name)
                groups[-1].append(name)
                first += weights[name].numel()
    return groups


def _loss_scaler(saved: Contents) -> dict[str, Any] | None:
    if "cur_scale" not in saved:
        return None
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {"dynamic": bool(saved.get("dynamic_loss_scale")), **{key: saved[key] for key in keys if key in saved}}
