"""Items in runs and tensors in parts, as code outside imports them from `deepspeed.runtime.utils`."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from aliased import ROOT
from ranks import RankPool

from zero.compat.helpers import PartitionedTensor, partition_balanced, partition_uniform, prefix_sum_inc

SHAPES = [(6, 4), (7,), (2, 1), (5, 3), (0, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_part_is_as_light_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.choice([0, draw.randrange(9), draw.random() * 5]) for _ in range(draw.randrange(1, 9))]
    parts = draw.randrange(1, 6)
    bounds = partition_balanced(weights, parts)
    assert len(bounds) == parts + 1 and (bounds[0], bounds[-1]) == (0, len(weights)) and bounds == sorted(bounds)
    cuts = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    loads = [max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts]
    assert max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds)) == pytest.approx(min(loads))


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1] * 8, 4, [0, 2, 4, 6, 8]),
        ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 30.0], 2, [0, 4, 5]),
        ([5, 5], 4, [0, 1, 2, 2, 2]),
        ([3], 1, [0, 1]),
    ],
)
def test_where_one_partition_is_best_it_is_deepspeeds(weights: list[float], parts: int, bounds: list[int]) -> None:
    assert partition_balanced(weights, parts) == bounds


def test_uniform_parts_differ_by_one_item_and_the_first_are_the_longer() -> None:
    for items, parts in itertools.product(range(20), range(1, 8)):
        bounds = partition_uniform(items, parts)
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        assert (bounds[0], bounds[-1], len(sizes)) == (0, items, parts)
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12] and prefix_sum_inc([]) == []


def in_parts() -> list[list[bool]]:
    found = []
    for shape in SHAPES:
        whole = torch.arange(float(math.prod(shape))).view(shape)
        parted = PartitionedTensor(whole, dist.group.WORLD)
        again = PartitionedTensor.from_meta(parted.to_meta(), parted.data(), dist.group.WORLD)
        found.append([torch.equal(each.full(), whole) and each.full_size() == [*shape] for each in (parted, again)])
        assert parted.local_size() == again.local_size() and parted.even_split == again.even_split
    wrong = parted.to_meta()
    wrong[-5] = 7  # the number of parts
    with pytest.raises(ValueError, match="as in the group, got part"):
        PartitionedTensor.from_meta(wrong, parted.data(), dist.group.WORLD)
    return found


def test_a_tensor_is_whole_again_from_its_parts(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(in_parts) == [[[True, True]] * len(SHAPES)] * 2


def test_it_has_every_name_of_deepspeeds() -> None:
    names = json.loads((ROOT / "tests/data/deepspeed_objects.json").read_text())["runtime.utils.PartitionedTensor"]
    for name, words in names["methods"].items():
        inspect.signature(getattr(PartitionedTensor, name)).bind_partial(**dict.fromkeys(words.split()))
    source = inspect.getsource(PartitionedTensor)
    assert [name for name in names["attributes"] if f".{name}" not in source] == []
