"""`deepspeed.checkpoint.utils.clone_tensors_for_torch_save`: a tree whose tensors own their memory."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The tree with a detached copy of each tensor; the same tensor twice becomes one copy.

    Args:
        item: a tensor, or lists, tuples and dicts of such; dicts keep their type. Anything else is handed back.
        device: of the copies.
    """
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, known: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        key = (id(item), item.shape, item.dtype)
        if key not in known:
            known[key] = item.detach().to(device, copy=True)
        return known[key]
    if isinstance(item, list):
        return [_cloned(value, device, known) for value in item]
    if isinstance(item, tuple):
        return tuple(_cloned(value, device, known) for value in item)
    if isinstance(item, dict):
        made: Any = type(item)()
        made.update({key: _cloned(value, device, known) for key, value in item.items()})
        return made
    return item
