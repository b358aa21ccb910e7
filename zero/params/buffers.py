"""State of modules besides parameters: buffers, with their device and dtype, and extra states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.errors import ConfigError
from offload.files.archives import pack_any
from zero.params.quantized_weights import quantized_tensor_names


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers to the device and cast floating ones to `dtype` (None: they keep their own), as in DeepSpeed.

    Running statistics are an exception: torch's norms refuse fp32 statistics with 16-bit weights, so without a `dtype`
    they take the dtype of the weights. Buffers of quantised storage always keep their dtype.
    """
    for module in model.modules():
        decoding, wanted = quantized_tensor_names(module), dtype or _dtype_of_statistics(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                cast = wanted if buffer.is_floating_point() and name not in decoding else None
                module._buffers[name] = buffer.to(device=device, dtype=cast or buffer.dtype)


def _dtype_of_statistics(module: nn.Module) -> torch.dtype | None:
    """The dtype that a norm's running statistics need; None: this module's buffers may keep theirs."""
    weight = module.weight if isinstance(module, _NormBase) else None
    return weight.dtype if weight is not None and weight.dtype in (torch.bfloat16, torch.float16) else None


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that `state_dict` would hold."""
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):  # under each of its names, as torch has it
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of each module with `get_extra_state` -> the object that it returns."""
    none: Any = nn.Module.get_extra_state
    named = model.named_modules()
    return {name: module.get_extra_state() for name, module in named if type(module).get_extra_state is not none}


def pack_extra_states(model: nn.Module, what: str) -> Any:
    """`extra_states` as `pack_any` packs them; None: there are none.

    Raises ConfigError: one cannot be pickled. `what`: the call, for the error.
    """
    extra = extra_states(model)
    try:
        return pack_any(extra) if extra else None
    except Exception as error:
        raise ConfigError(
            f"{what}: the state that get_extra_state of a module returns ({', '.join(extra)}) cannot be pickled: "
            f"{type(error).__name__}: {error}; return plain values or tensors"
        ) from error


def has_extra_state_setter(model: nn.Module) -> bool:
    none: Any = nn.Module.set_extra_state
    return any(type(module).set_extra_state is not none for module in model.modules())


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the results of `extra_states` again, on modules that have `set_extra_state`."""
    none: Any = nn.Module.set_extra_state
    for name, module in model.named_modules():
        if name in states and type(module).set_extra_state is not none:
            module.set_extra_state(states[name])
