"""DeepSpeed's universal checkpoints: a folder for each trained parameter, with a file for each of its values.

`zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt` are made from a checkpoint of stage 1, 2 or 3; other optimizers have other
states. Below stage 3 a file has a dict with the tensor in its shape, at stage 3 the flattened tensor alone.
`zero/optimizer_state.pt` has what is common to all; the model states are those of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, TorchFile, replace_unknown
from zero.checkpoint.dcp_format import MODEL, STEP, state_name
from zero.checkpoint.deepspeed_files import Contents, group_steps, read_model, require, resolve_stranger, to_int
from zero.checkpoint.deepspeed_values import (
    ConstantTensor,
    FoundTensors,
    Shapes,
    ShardedTensor,
    TrainedParameters,
    groups_with_names,
    shapes_of,
    tied_names,
)

COMMON = Path("zero", "optimizer_state.pt")
WEIGHT, PARAM = "fp32", "param"


def read_universal(folder: Path) -> TrainedParameters:
    """What a universal checkpoint has. Raises ConfigError: a file is missing or damaged."""
    path = folder / COMMON
    file = TorchFile(path, "the optimizer's common state of a universal checkpoint")
    require(file, "param_groups")
    common: Contents = file.contents
    stage = to_int(common.get("zero_stage", 1))
    count = common.get("partition_count", 1)
    ranks = max(map(int, count)) if isinstance(count, list) else int(count)
    models = [read_model(folder, stage, rank) for rank in range(ranks if stage == 3 else 1)]
    head, shapes = models[0].contents, shapes_of(models[0].contents)
    steps = _steps(common, shapes)
    tensors: FoundTensors = {}
    for place, group in enumerate(shapes):
        for name, shape in group.items():
            tensors.update(_values(folder, name, shape, steps[place], head))
    scaler = replace_unknown(common.get("loss_scaler"), f"{path}: loss_scaler", resolve_stranger)
    groups = groups_with_names(common["param_groups"], path, shapes)
    names = [name for group in shapes for name in group]
    return TrainedParameters(tensors, names, groups, tied_names(head, stage), stage, models, scaler)


def _steps(common: Contents, shapes: list[Shapes]) -> list[int | None]:
    """Number of steps of each flat group, where the parameters have no file of it: at stage 3, and with fused Adam."""
    steps = group_steps(common["param_groups"], len(shapes), common.get("base_optimizer_state_step"))
    inner = (common.get("optimizer_state_dict") or {}).get("state", {})
    for place, step in enumerate(steps):
        saved = (inner.get(place) or {}).get(STEP)
        steps[place] = step if saved is None else to_int(saved)
    return steps


def _values(folder: Path, name: str, shape: torch.Size, step: int | None, head: Contents) -> FoundTensors:
    """A parameter's weight, states and step count."""
    own = folder / COMMON.parent / name
    if own.parent != folder / COMMON.parent:
        raise ConfigError(f"{folder}: expected the name of a parameter, got {name!r}: it leads out of its folder")
    paths: Mapping[str, Path] = {path.stem: path for path in sorted(own.glob("*.pt"))}
    if WEIGHT not in paths:
        raise ConfigError(f"{own / WEIGHT}.pt: missing; expected the weight of {name}. {COPY}")
    tensors: FoundTensors = {}
    for kind, path in paths.items():
        if kind == STEP:
            step = to_int(TorchFile(path, f"{kind} of {name}").contents)
        else:
            tensors[MODEL + name if kind == WEIGHT else state_name(name, kind)] = shape, _tensor(path, name, shape)
    if len(tensors) > 1:
        step = to_int(head["global_steps"]) - to_int(head["skipped_steps"]) if step is None else step
        tensors[state_name(name, STEP)] = torch.Size(), ConstantTensor(step, torch.int64)
    return tensors


def _tensor(path: Path, name: str, shape: torch.Size) -> ShardedTensor:
    file = TorchFile(path, f"{path.stem} of {name}")
    contents = file.contents
    tensor = contents.get(PARAM) if isinstance(contents, dict) else contents
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != shape.numel():
        got = f"{tensor.numel():,} elements" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(f"{path}: expected a tensor of {shape.numel():,} elements, shape {tuple(shape)}, got {got}")
    return ShardedTensor([file.locate(tensor)], max(tensor.numel(), 1), torch.float32)
