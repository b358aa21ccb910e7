"""What a checkpoint of DeepSpeed has, as a `Source` that is read by range: tensors, param groups, names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.files.torch_file import COPY, FileTensor, TorchFile, replace_unknown
from offload.system.regular_files import report_read_errors
from zero.checkpoint.deepspeed_files import Contents, resolve_stranger
from zero.checkpoint.source import TensorInfo

# End of the names under which modules add other things than parameters to a state dict.
EXTRA_STATE_SUFFIX = "_extra_state"
Shapes = Mapping[str, torch.Size]
# Keys of param groups that choose between implementations, or are not options.
SWITCHES = frozenset(
    [
        *("step", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
        *("decoupled_weight_decay", "bias_correction", "param_names"),
    ]
)


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor that is sharded over the parts of several ranks.

    Element i is in part `(first + i) // part_numel`, there at `base + (first + i) % part_numel`. Tensors that were
    flattened together and then sharded have a common `part_numel`, and a `first` each. Tensors that were sharded one by
    one have a `base` each, and `first` is 0.

    `parts`: the part of each rank. `dtype`: the dtype that `read` returns; at least as wide as the parts.
    """

    parts: Sequence[FileTensor]
    part_numel: int
    dtype: torch.dtype
    first: int = 0
    base: int = 0

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `begin` on, in row-major order. Raises StorageError."""
        position, done = self.first + begin, 0
        while done < out.numel():
            rank, offset = divmod(position + done, self.part_numel)
            count = min(self.part_numel - offset, out.numel() - done)
            part, target = self.parts[rank], out[done : done + count]
            if part.dtype == self.dtype:
                part.read(self.base + offset, target)
            else:
                narrow = torch.empty(count, dtype=part.dtype, device="cpu")
                part.read(self.base + offset, narrow)
                target.copy_(narrow)
            done += count


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """A tensor whose elements are all `value`."""

    value: float
    dtype: torch.dtype

    def read(self, begin: int, out: torch.Tensor) -> None:
        out.fill_(self.value)


Values = ShardedTensor | ConstantTensor


class DeepSpeedSource:
    """A `Source` of such tensors. `tensors`: name -> (shape, values); `where`: the folder, for errors."""

    def __init__(self, tensors: Mapping[str, tuple[torch.Size, Values]], where: str) -> None:
        self._values_of, self._folder_name = tensors, where
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, values.dtype) for name, (shape, values) in tensors.items()
        }

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor. Raises StorageError."""
        if name not in self._values_of:
            raise ConfigError(f"{self._folder_name}: it has no tensor {name}; it has {len(self._values_of)} tensors")
        shape, values = self._values_of[name]
        if not 0 <= begin <= end <= shape.numel():
            raise IndexError(f"{name}: elements [{begin}, {end}) of {shape.numel()}")
        with report_read_errors(self._folder_name, COPY):
            out = torch.empty(end - begin, dtype=values.dtype, device="cpu")
            values.read(begin, out)
        return out

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Does nothing: there is no read-ahead."""

    def close(self) -> None:
        """Does nothing: no file is open between two reads."""


FoundTensors = dict[str, tuple[torch.Size, Values]]  # Name of our logical form -> shape and values.


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """What a folder has of the parameters that are trained, and the files that have everything else.

    Attributes:
        tensors: weights, states and step counts.
        names: of the parameters.
        groups: the param groups, with names.
        aliases: tied name -> first name.
        stage: of ZeRO.
        models: every rank's model_states at stage 3, else the only one.
        loss_scaler: its state, or None.
    """

    tensors: FoundTensors
    names: Sequence[str]
    groups: list[dict[str, Any]]
    aliases: Mapping[str, str]
    stage: int
    models: Sequence[TorchFile]
    loss_scaler: Any


def shapes_of(head: Contents) -> list[Shapes]:
    """For each flat group, its parameters in order."""
    return [{str(name): _size(name, shape) for name, shape in group.items()} for group in head["param_shapes"]]


def _size(name: str, shape: Iterable[int]) -> torch.Size:
    size = torch.Size(shape)
    if min(size, default=0) < 0:
        raise ConfigError(f"param_shapes: {name}: expected sizes of at least 0, got {tuple(size)}. {COPY}")
    return size


def tied_names(head: Contents, stage: int) -> dict[str, str]:
    """Tied name -> first name.

    Below stage 3 DeepSpeed finds tied tensors by address. Tensors without elements share one, so they are left out.
    """
    tied = {str(name): str(first) for name, first in (head.get("shared_params") or {}).items()}
    module = head["module"]
    return {name: first for name, first in tied.items() if stage == 3 or name not in module or module[name].numel()}


def unsharded_tensor(file: TorchFile, tensor: torch.Tensor) -> ShardedTensor:
    """A tensor that is unsharded, in one file."""
    return ShardedTensor([file.locate(tensor)], max(tensor.numel(), 1), tensor.dtype)


def groups_with_names(
    saved: Sequence[Contents], path: Path, shapes: Sequence[Sequence[str] | Shapes]
) -> list[dict[str, Any]]:
    """The param groups, with names; at stage 3 one param group consists of several flat groups."""
    if not saved:
        return [{"params": list(group)} for group in shapes]
    groups = []
    for index, group in enumerate(saved):
        options = replace_unknown(dict(group), f"{path}: param_groups[{index}]", resolve_stranger)
        names = [name for place in options.pop("params") for name in shapes[place]]
        plain_options = {str(key): _plain(value) for key, value in options.items() if key not in SWITCHES}
        groups.append({**plain_options, "params": names})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(value) if isinstance(value, list) else value
