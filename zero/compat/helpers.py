"""`deepspeed.runtime.utils` and similar modules: small functions that scripts use."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero.assembly.state_kinds import OffloadStateTypeEnum
from zero.compat.accelerator_names import get_accelerator
from zero.moe.layer import MoE
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero.ops.lion import DeepSpeedCPULion, FusedLion
from zero.params.gathering import GatheredParameters
from zero.params.released_parameter import is_managed
from zero.ranks import world


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that hold one kind of an engine's states on this rank; states on NVMe are on no device."""
    devices: set[torch.device] = model.state_devices(state)
    return devices


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory use of device and host on the first rank; only with `force`, as in DeepSpeed.

    The most that the device has used is counted anew from here on.
    """
    if not force or world.rank() != 0:
        return
    accelerator, gib = get_accelerator(), 2.0**30
    host = psutil.virtual_memory()
    used, most = accelerator.memory_allocated() / gib, accelerator.max_memory_allocated() / gib
    device = f"device {used:.2f} GB now, {most:.2f} GB at most"
    print(f"{message}: {device}; host {host.used / gib:.2f} GB used, {host.percent:.1f}%", flush=True)
    accelerator.reset_peak_memory_stats()


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move the tensors in a tree of lists, tuples and dicts; with a criterion only those that it selects, in place."""

    def move(tensor: Any) -> Any:
        return tensor.to(device)

    def move_in_place(tensor: Any) -> Any:
        tensor.data = tensor.to(device).data
        return tensor

    return _map_tensors(item, move if criterion_func is None else move_in_place, criterion_func)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Like `move_to_device`, with copies."""
    return _map_tensors(item, lambda tensor: tensor.detach().clone().to(device), criterion_func)


def _map_tensors(item: Any, change: Callable[[Any], Any], picks: Callable[[Any], bool] | None) -> Any:
    if (picks or torch.is_tensor)(item):
        return change(item)
    if isinstance(item, (list, tuple)):
        kind = list if isinstance(item, list) else tuple
        return kind(_map_tensors(value, change, picks) for value in item)
    if isinstance(item, dict):
        return {key: _map_tensors(value, change, picks) for key, value in item.items()}
    return item


def set_random_seed(seed: int) -> None:
    numpy.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """The function of torch, for parameters that no engine holds."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    return float(sum(float(norm) ** 2 for norm in norm_list) ** 0.5)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The common value of all items. Raises RuntimeError: there are several values."""
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return unique.pop()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """True if torch's version is between these bounds, such as 2.6; None: no bound."""
    here = torch.torch_version.TorchVersion(".".join(torch.__version__.split("+")[0].split(".")[:2]))
    return (min_version is None or here >= str(min_version)) and (max_version is None or here <= str(max_version))


class TiledMLP:
    """The forward of a module over slices of the sequence; backward recomputes each slice.

    `apply` is called on the class, as with the autograd function in DeepSpeed.
    """

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], module: Any, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        """`fn(module, x)`, where `fn` treats each position separately. `compute_params`: accepted, not needed."""
        slices = x.chunk(shards, dim=-2)
        return torch.cat([checkpoint(fn, module, part, use_reentrant=False) for part in slices], dim=-2)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: `engine.trace` has the timeline."""
    return func


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has MoE layers (`zero.moe.MoE`), and the number of experts in the last of them."""
    counts = [module.num_experts for module in m.modules() if isinstance(module, MoE)]
    return bool(counts), counts[-1] if counts else 0


def is_moe_param(param: Tensor) -> bool:
    return hasattr(param, "allreduce") and not param.allreduce


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The param groups as a list: experts are on every rank, so they need no separate groups.

    Raises ValueError: `param_groups` is neither a group nor a list of groups.
    """
    if isinstance(param_groups, dict):
        return [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}")
    return list(param_groups)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, all weights of an engine are gathered and its hooks are removed, for `generate`.

    `engine.generation()` needs less memory.
    """
    offload = getattr(model, "parameter_offload", None)
    with GatheredParameters([p for p in model.parameters() if is_managed(p)]):
        for handle in offload.forward_hooks if offload is not None else ():
            handle.remove()
        if offload is not None:
            offload.forward_hooks = []
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)


class ZeRORuntimeException(Exception):
    """DeepSpeed's exception for optimizers and settings that it does not support; it is never raised here."""


# Those that DeepSpeed names; any other of torch works too.
ZERO_SUPPORTED_OPTIMIZERS = [
    torch.optim.Adam,
    torch.optim.AdamW,
    FusedAdam,
    DeepSpeedCPUAdam,
    torch.optim.Adagrad,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    FusedLion,
]


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """True if ZeRO supports this optimizer: any of torch's."""
    return isinstance(optimizer, torch.optim.Optimizer)


def recursive_getattr(model: Any, module_name: str) -> Any:
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def convert_conv1d_to_linear(model: Any, convert_type: type[nn.Module]) -> Any:
    """The model with each of its modules of a type, such as GPT-2's Conv1D, replaced in place by an nn.Linear.

    Args:
        model: a model, or an object that has it as `module`. No engine may hold it, since its parameters are replaced.
        convert_type: with a `weight` of shape (in, out), and a `bias` or None.
    """
    root: nn.Module = getattr(model, "module", model)
    for name, old in [(name, old) for name, old in root.named_modules() if isinstance(old, convert_type)]:
        weight: nn.Parameter = old.get_parameter("weight")
        bias: nn.Parameter | None = getattr(old, "bias", None)
        new = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
        new.weight = nn.Parameter(weight.data.t().contiguous(), requires_grad=weight.requires_grad)
        if bias is not None:
            new.bias = nn.Parameter(bias.data.reshape(-1), requires_grad=bias.requires_grad)
        recursive_setattr(root, name, new)
    return model
