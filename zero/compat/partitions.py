"""The arithmetic of `deepspeed.runtime.utils`: items in runs, and a tensor that is spread over the ranks of a group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import ConfigError
from zero.pipe.partition import balance_parts


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
