"""The model's buffers: which there are, and on the device, in the dtype the computation expects."""

from __future__ import annotations

import torch
from torch import nn

from zero.params.opaque import decoding_names


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers to the device; as in DeepSpeed floating ones take the compute dtype.

    Those that are no part of the state dict keep theirs: they are derived tables (rotary
    frequencies, say) that need their precision. So do those that belong to quantised storage.
    """
    for module in model.modules():
        decoding = decoding_names(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                computed = persistent and buffer.is_floating_point() and name not in decoding
                cast = dtype if dtype is not None and computed else buffer.dtype
                module._buffers[name] = buffer.to(device=device, dtype=cast)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `state_dict` would hold besides parameters."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):  # under each of its names, as torch has it
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
