"""Flat ranges of a tensor as boxes: what torch.distributed.checkpoint calls chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor, contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of the flattened tensor in as few boxes as each can be made long, in order.

    A tensor without elements is one empty box, of [0, 0).
    """
    if math.prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape), 0)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        offsets = [begin // stride % size for stride, size in zip(strides, shape, strict=True)]
        for dim, stride in enumerate(strides):
            rows = min((end - begin) // stride, shape[dim] - offsets[dim])
            if begin % stride == 0 and rows > 0:
                sizes = (1,) * dim + (rows,) + tuple(shape[dim + 1 :])
                break
        else:  # a tensor of no dimensions
            rows, stride, sizes = 1, 1, ()
        yield Box(tuple(offsets), sizes, begin)
        begin += rows * stride


def short_boxes(shape: Sequence[int], begin: int, end: int, numel_max: int) -> Iterator[Box]:
    """As `boxes_of`, in boxes of at most `numel_max` elements, of whole rows of the first dimension where they fit."""
    row = max(math.prod(shape[1:]), 1)
    while begin < end or (begin == end and math.prod(shape) == 0):
        stop = min(begin + numel_max, end)
        if stop < end and stop // row * row > begin:
            stop = stop // row * row
        yield from boxes_of(shape, begin, stop)
        if begin == stop:
            return
        begin = stop


def begin_of(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at `offsets` is in the flattened tensor."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


def is_flat(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True when a box of these sizes is contiguous in the flattened tensor."""
    inner = [size == whole for size, whole in zip(sizes, shape, strict=True)]
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return all(inner[first + 1 :])
