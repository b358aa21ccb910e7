"""Quantised storage: packed codes and what decodes them are bytes, moved as they are and never cast.

Codes are integers or 8-bit floats, or in whatever dtype bitsandbytes was told to store them in
(`bnb_4bit_quant_storage`): a parameter that carries a `quant_state` is codes. What lies beside codes in the same module
(scales, zero points) decodes them with the precision it was made with, so it keeps its dtype where other frozen tensors
take the compute dtype; a bias takes part in the computation and does not. A tensor subclass that wraps other tensors
moves as what it wraps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CODES = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32))
_COMPUTED = frozenset(("bias",))
"""Names of tensors beside packed codes that are added to activations."""


def is_packed(tensor: torch.Tensor) -> bool:
    """True for codes of a quantised weight; counters and masks (0-d, bool, int64) are none."""
    if getattr(tensor, "quant_state", None) is not None:
        return True
    eight_bit_float = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.dim() > 0 and (tensor.dtype in _CODES or eight_bit_float)


def holds_packed(module: nn.Module) -> bool:
    """True when a parameter or buffer of the module itself is packed."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and (is_wrapper(tensor) or is_packed(tensor)) for tensor in own)


def decoding_names(module: nn.Module) -> frozenset[str]:
    """The module's own tensors that belong to quantised storage, so that their dtype is not ours."""
    if not holds_packed(module):
        return frozenset()
    return frozenset(name for name in (*module._parameters, *module._buffers) if name not in _COMPUTED)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass that holds its bytes in other tensors (torchao's, for one)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, plain tensor) of everything a wrapper holds, as deep as it goes; of a plain tensor itself."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from inner_tensors(getattr(tensor, attribute), f"{name}.{attribute}")


def opaque_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """As `decoding_names`, for a whole state dict (meta tensors will do)."""
    modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if is_packed(tensor)}
    parts = ((name, *name.rpartition(".")[::2]) for name in tensors)
    return {name for name, module, own in parts if module in modules and own not in _COMPUTED}
