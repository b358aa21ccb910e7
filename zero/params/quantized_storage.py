"""Quantised storage: packed codes and the tensors that decode them are moved as bytes and never cast.

Codes are integers or 8-bit floats, or they have the dtype of bitsandbytes' `bnb_4bit_quant_storage`: a parameter with a
`quant_state` counts as codes. Other tensors in the same module (scales, zero points) decode the codes and need their
original precision, so they keep their dtype where other frozen tensors take the compute dtype. A bias is part of the
computation and takes the compute dtype too. A tensor subclass that wraps other tensors is moved as these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CODES = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32))
_NOT_DECODING = frozenset(("bias",))
"""Names of tensors in modules with packed codes that are added to activations instead of decoding."""


def is_packed(tensor: torch.Tensor) -> bool:
    """True for codes of a quantised weight; False for counters and masks (0-d, bool, int64)."""
    if getattr(tensor, "quant_state", None) is not None:
        return True
    eight_bit_float = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.dim() > 0 and (tensor.dtype in _CODES or eight_bit_float)


def has_packed_tensors(module: nn.Module) -> bool:
    """True if a parameter or buffer of the module itself is packed."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and (is_wrapper(tensor) or is_packed(tensor)) for tensor in own)


def quantized_tensor_names(module: nn.Module) -> frozenset[str]:
    """Names of the module's own tensors that belong to quantised storage and keep their dtype."""
    if not has_packed_tensors(module):
        return frozenset()
    return frozenset(name for name in (*module._parameters, *module._buffers) if name not in _NOT_DECODING)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass that holds its bytes in other tensors (for example torchao's)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, plain tensor) of all tensors inside a wrapper, recursively; a plain tensor gives itself."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from inner_tensors(getattr(tensor, attribute), f"{name}.{attribute}")


def quantized_state_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """As `quantized_tensor_names`, for a whole state dict (meta tensors will do)."""
    modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if is_packed(tensor)}
    parts = ((name, *name.rpartition(".")[::2]) for name in tensors)
    return {name for name, module, own in parts if module in modules and own not in _NOT_DECODING}
