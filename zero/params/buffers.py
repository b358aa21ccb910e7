"""What modules have besides parameters: buffers, on the device, in the dtype that is asked for; extra states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero.params.opaque import decoding_names


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers to the device; floating ones become `dtype`, and keep their own if it is None, as in DeepSpeed.

    Running statistics are an exception: torch computes no norm of them in fp32 beside weights in 16 bits, so without a
    `dtype` they take that of the weights. Those that belong to quantised storage always keep theirs.
    """
    for module in model.modules():
        decoding, wanted = decoding_names(module), dtype or _dtype_of_statistics(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                cast = wanted if buffer.is_floating_point() and name not in decoding else None
                module._buffers[name] = buffer.to(device=device, dtype=cast or buffer.dtype)


def _dtype_of_statistics(module: nn.Module) -> torch.dtype | None:
    """What a norm's running statistics have to be in; None: they, or another module's buffers, may stay."""
    weight = module.weight if isinstance(module, _NormBase) else None
    return weight.dtype if weight is not None and weight.dtype in (torch.bfloat16, torch.float16) else None


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `state_dict` would hold besides parameters."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):  # under each of its names, as torch has it
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of a module -> what it adds to a state dict by `get_extra_state`, of those that have one. Any object."""
    none: Any = nn.Module.get_extra_state
    named = model.named_modules()
    return {name: module.get_extra_state() for name, module in named if type(module).get_extra_state is not none}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what `extra_states` has said; who takes none is left alone."""
    none: Any = nn.Module.set_extra_state
    for name, module in model.named_modules():
        if name in states and type(module).set_extra_state is not none:
            module.set_extra_state(states[name])
