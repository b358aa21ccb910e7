"""Values of a model from a folder of safetensors files, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from offload.errors import ConfigError
from zero.params.gathering import GatheredParameters


def fill(model: nn.Module, folder: str) -> None:
    """Copy every tensor that the files name into the model's parameter or buffer of that name.

    Args:
        model: with ordinary parameters, or such as `zero.Init` has cut; dtypes are cast to the model's.
        folder: every `*.safetensors` in it is read.

    Raises:
        ConfigError: no such file; a name or shape that the model has not; a parameter that no file has.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"checkpoint: {folder}: expected a folder with .safetensors files, found none")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    filled: set[int] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                target = parameters.get(name, buffers.get(name))
                shape = tuple(content.get_slice(name).get_shape())
                if target is None or tuple(target.shape) != shape:
                    has = "no such tensor" if target is None else f"one of shape {tuple(target.shape)}"
                    raise ConfigError(f"checkpoint: {file}: {name} has shape {shape}, the model has {has}")
                with GatheredParameters([target] if isinstance(target, nn.Parameter) else []), torch.no_grad():
                    target.copy_(content.get_tensor(name))
                filled.add(id(target))
    missing = [name for name, parameter in parameters.items() if id(parameter) not in filled]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"checkpoint: {folder}: no file has {', '.join(missing[:3])}{more}, which the model needs")
