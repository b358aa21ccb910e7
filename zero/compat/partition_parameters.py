"""`deepspeed.runtime.zero.partition_parameters`: clients replace names in this module, and `Init` reads them here."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.compat.accelerator_names import get_accelerator
from zero.config import reading_as_deepspeed
from zero.dist.initialization import init_distributed
from zero.params.gathering import GatheredParameters
from zero.params.initialisation import Init as OurInit
from zero.params.released_parameter import ZeroParamStatus, has_ds_attributes

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "partitioned_param_data_shape",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

# Functions of torch that `zero_wrapper_for_fp_tensor_constructor` wraps inside `Init`.
CONSTRUCTORS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
}
globals().update({f"_orig_torch_{name}": constructor for name, constructor in CONSTRUCTORS.items()})

partitioned_param_data_shape = [0]  # Shape of a released parameter in DeepSpeed; here it keeps its own shape.


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype | None = None, target_device: torch.device | None = None
) -> Callable[..., Tensor]:
    """A constructor with a fixed dtype for floating results, and a default device.

    Clients replace this function by their own before they enter `Init`.

    Args:
        fn: torch's constructor.
        target_fp_dtype: None: torch's choice.
        target_device: used if the caller names none; None: torch's choice.
    """

    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        if target_fp_dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    return construct


class Init(OurInit):
    """`zero.Init` for DeepSpeed's clients: it initialises torch.distributed if needed, and wraps torch's constructors.

    The wrapper gets no dtype and no device: values are constructed as torch makes them, so that they keep their bits
    until the engine has made its masters.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enabled", True) and not dist.is_initialized():
            init_distributed()
        self._is_wrapping = self.sets_ds_attributes = bool(kwargs.get("enabled", True))
        self._saved_constructors: dict[str, Any] = {}
        with reading_as_deepspeed():
            super().__init__(*args, **kwargs)

    def __enter__(self) -> OurInit:
        entered = super().__enter__()
        if self._is_wrapping:
            self._saved_constructors = {name: getattr(torch, name) for name in CONSTRUCTORS}
            for name, fn in CONSTRUCTORS.items():
                wrap = globals()["zero_wrapper_for_fp_tensor_constructor"]
                setattr(torch, name, wrap(fn, target_fp_dtype=None, target_device=None))
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, fn in self._saved_constructors.items():
            setattr(torch, name, fn)
        self._saved_constructors.clear()
        super().__exit__(kind, error, trace)


class MiCS_Init(Init):
    """Like `Init`: the number of ranks that share the weights is decided with the engine, by `mics_shard_size`."""


def is_zero_param(parameter: Any) -> bool:
    """True when the parameter must be gathered before use: it is in an engine at stage 3, or was made in `Init`."""
    return isinstance(parameter, nn.Parameter) and has_ds_attributes(parameter)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted, not needed: a parameter that is used outside its own module is fetched when it is accessed.

    Raises RuntimeError: it is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The counterpart of `register_external_parameter`; accepted. Raises RuntimeError: it is no parameter."""
    register_external_parameter(module, parameter)
