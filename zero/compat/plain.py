"""Small functions of DeepSpeed that need no engine: values, sizes, ranges, names for debugging, `OnDevice`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of the pairs, for `json.load(object_pairs_hook=...)`. Raises ValueError: a key occurs twice."""
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return dict(ordered_pairs)


def convert_size(size_bytes: int) -> str:
    if size_bytes == 0:
        return "0B"
    step = math.floor(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**step, 2)} {UNITS[step]}"


def parse_range(rng: str) -> range:
    """The numbers in "3" or "2-4". Raises ValueError."""
    words = rng.split("-")
    first, last = int(words[0]), int(words[-1])
    if len(words) > 2 or first > last:
        raise ValueError(f"Bad range: {rng!r}; expected a number, or two joined by a dash, the smaller first")
    return range(first, last + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The numbers in "0,2-4,6". Raises ValueError: a bad range, or ranges that do not ascend."""
    numbers = [number for word in range_str.split(",") for number in parse_range(word)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"Bad range list: {range_str!r}; expected ranges that ascend and do not overlap")
    return numbers


def _environment_number(of_torchrun: str, of_mpi: str, default: int) -> int:
    return int(os.environ.get(of_torchrun, os.environ.get(of_mpi, default)))


def get_local_rank_from_launcher() -> int:
    return _environment_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0)


def get_world_rank_from_launcher() -> int:
    return _environment_number("RANK", "OMPI_COMM_WORLD_RANK", 0)


def get_world_size_from_launcher() -> int:
    return _environment_number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1)


class OnDevice:
    """A context in which tensors are constructed on a device, and floating ones with a dtype.

    Args:
        dtype: of floating tensors constructed without one.
        device: such as "meta".
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)


module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
param_names: dict[int, tuple[ref[Tensor], str]] = {}


def debug_clear_module_and_param_names() -> None:
    module_names.clear()
    param_names.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    debug_clear_module_and_param_names()
    module_names.update({module: name for name, module in model.named_modules()})
    param_names.update({id(parameter): (ref(parameter), name) for name, parameter in model.named_parameters()})


def debug_module2name(module: nn.Module) -> str:
    return module_names.get(module, "unknown")


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    reference, name = param_names.get(id(param), (None, ""))
    return name if reference is not None and reference() is param else "unknown"


def debug_param2name_id(param: Tensor) -> str:
    return f"name={debug_param2name(param)} id={getattr(param, 'ds_id', 'none')}"


def debug_param2name_id_shape(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} shape={getattr(param, 'ds_shape', param.shape)}"


def debug_param2name_id_shape_device(param: Tensor) -> str:
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} numel={param.numel()}"


def debug_param2name_id_shape_status(param: Tensor) -> str:
    return f"{debug_param2name_id_shape(param)} status={getattr(param, 'ds_status', 'none')}"
