"""Small things of DeepSpeed that scripts use: of `runtime.utils`, `utils`, `moe.utils`, `runtime.zero` and others."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.errors import ConfigError
from zero.assembly.device_memory import OffloadStateTypeEnum
from zero.compat.accelerator_names import get_accelerator
from zero.dist import world
from zero.models.moe import MoE
from zero.models.pipeline_module import balance_parts
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero.ops.lion import DeepSpeedCPULion, FusedLion
from zero.params.gathering import GatheredParameters
from zero.params.released_parameter import is_managed

UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")


# ---- memory, tensors, numbers ------------------------------------------------------------------


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


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: `engine.trace` has the timeline."""
    return func


# ---- values of a configuration, ranges, ranks of a launcher ------------------------------------


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


# ---- models and their modules ------------------------------------------------------------------


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


# ---- engines -----------------------------------------------------------------------------------


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that hold one kind of an engine's states on this rank; states on NVMe are on no device."""
    devices: set[torch.device] = model.state_devices(state)
    return devices


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


# ---- items in runs, and a tensor that is spread over the ranks of a group ----------------------


def prefix_sum_inc(weights: Sequence[Any]) -> list[Any]:
    """The sums of the first 1, 2, ... weights."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of the parts: part i has items [bounds[i], bounds[i + 1]). The first parts have one item more, if any."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[Any], num_parts: int) -> list[int]:
    """Bounds of the parts, such that the weight of the heaviest part is minimal. None is empty, if there is one each.

    Of several such partitions it need not be DeepSpeed's.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return balance_parts(weights, num_parts)


class PartitionedTensor:
    """A tensor of which each rank of a group has a part. All ranks make it of the same tensor.

    Args:
        tensor: whole, on each rank.
        group: a process group.
        partition_meta: no effect, as in DeepSpeed.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group, self.num_parts, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        self.even_split = tensor.numel() % self.num_parts == 0
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """The tensor of which `local_part` is this rank's part, from `to_meta()`.

        Raises ConfigError: the group has another number of ranks, or this one has another number in it.
        """
        tensor = cls(local_part[:0], group)
        dims, *numbers = meta.tolist()
        tensor.orig_size, (parts, rank, *tensor.partition) = numbers[:dims], numbers[dims:]
        if (parts, rank) != (tensor.num_parts, tensor.rank):
            raise ConfigError(
                f"PartitionedTensor.from_meta: expected part {tensor.rank} of {tensor.num_parts}, as in the group, "
                f"got part {rank} of {parts}; give the rank that made it its own meta"
            )
        tensor.even_split = math.prod(tensor.orig_size) % parts == 0
        tensor.orig_device = local_part.device if device is None else torch.device(device)
        tensor.local_data = local_part.detach()
        return tensor

    def to_meta(self) -> Tensor:
        """Number of dimensions, sizes, number of parts, this part, bounds of the parts; on the tensor's device."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor; all ranks call it. `device`: None: that of the tensor it was made of."""
        sizes = [end - begin for begin, end in itertools.pairwise(self.partition)]
        part = self.local_data.new_zeros(max(sizes), device=device or self.orig_device)
        part[: sizes[self.rank]] = self.local_data
        parts = [torch.empty_like(part) for _ in sizes]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)]).view(self.orig_size)

    def data(self) -> Tensor:
        """This rank's part, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


# ---- names for debugging -----------------------------------------------------------------------


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
