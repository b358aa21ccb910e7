"""`elasticity`: one batch size that many numbers of ranks divide, so that a job may continue with more or fewer ranks.

[Source: DeepSpeed's elasticity, versions 0.1 and 0.2 of its rule, as its change #8237 has left it] A candidate is a
micro-batch, or the least common multiple of all of them where that is within the limit, times the largest highly
composite number that keeps it there. The candidate that most numbers of ranks can share is taken. The results are
those of that rule wherever it has one that can be trained with. Before that change the multiple was a candidate above
the limit too: a job that DeepSpeed began with such a batch gets another one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from zero.config.fields import ConfigBlock, Flag, Integer, Number, problem, reads
from zero.config.inactive_keys import inactive_keys
from zero.config.numbers import parse_integer

# Each number has more divisors than every smaller one; the same list as in DeepSpeed.
HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


def _parse_sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("a list of sizes")
    sizes = tuple(parse_integer(item) for item in value)
    if min(sizes) < 1:
        raise ValueError("sizes of at least 1")
    return sizes


class Elasticity(ConfigBlock):
    """`elasticity`: chooses `train_batch_size` and the micro-batch from the number of ranks."""

    rows = inactive_keys("elasticity")
    is_open = True

    enabled: Flag = False
    max_train_batch_size: Annotated[Integer, Field(ge=1)] = 2000
    micro_batch_sizes: Annotated[tuple[int, ...], reads(_parse_sizes)] = (2, 4, 6)
    """Samples of a rank at once that its memory allows."""
    min_gpus: Annotated[Integer, Field(ge=1)] = 1
    """Fewest ranks that the job may have."""
    max_gpus: Annotated[Integer, Field(ge=1)] = 10000
    version: Number = 0.1
    """0.1: any number of ranks that divides the batch; 0.2: whole nodes."""
    prefer_larger_batch: Flag = True
    ignore_non_elastic_batch_info: Flag = False
    """Batch sizes that stand in the configuration too are passed over; else they are an error."""
    model_parallel_size: Annotated[Integer, Field(ge=1)] = 1
    """1: tensor parallelism is not available."""
    num_gpus_per_node: Annotated[Integer, Field(ge=1)] = 1
    """Of version 0.2."""


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """The chosen batch size."""

    train_batch_size: int
    ranks: tuple[int, ...]
    """Numbers of ranks that can share it, ascending."""
    micro_batch_size: int | None
    """Micro-batch of one rank; None: no number of ranks was given."""


def candidate_batch_sizes(bases: Iterable[int], largest: int) -> list[int]:
    """For each base within `largest`, its product with the largest highly composite number that stays there too."""
    products = set()
    for base in bases:
        if base <= largest:
            index = bisect.bisect_right(HIGHLY_COMPOSITE, largest // base)
            products.add(base * HIGHLY_COMPOSITE[index - 1])
    return sorted(products)


def ranks_that_share(batch: int, micro_batches: Sequence[int], fewest: int, most: int) -> list[int]:
    """Numbers of ranks in [fewest, most] that can share `batch` in whole steps of some micro-batch."""
    shares = [batch // micro for micro in micro_batches if batch % micro == 0]
    every = {divisor for share in shares for divisor in _divisors(share)}
    return sorted(ranks for ranks in every if fewest <= ranks <= most)


def _divisors(number: int) -> set[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def best_batch(block: Elasticity, largest: int, fewest: int, most: int) -> tuple[int, list[int]]:
    """The batch size that most numbers of ranks share, and these. Raises ValueError: a micro-batch is too big."""
    sizes = block.micro_batch_sizes
    if max(sizes) > largest:
        raise ValueError(f"micro_batch_sizes of at most max_train_batch_size, {largest}")
    best: tuple[int, list[int]] = min(sizes), []
    for batch in candidate_batch_sizes([*sizes, math.lcm(*sizes)], largest):
        ranks = ranks_that_share(batch, sizes, fewest, most)
        larger = len(ranks) == len(best[1]) and (batch > best[0]) == block.prefer_larger_batch
        if len(ranks) > len(best[1]) or larger:
            best = batch, ranks
    return best


def elastic_batch(block: Elasticity, world_size: int = 0) -> ElasticBatch:
    """The choice of `block`; `world_size`: number of ranks, 0 for the batch size alone.

    Raises ValueError: its text says what was expected, such as other numbers of ranks.
    """
    if block.model_parallel_size > 1:
        raise ValueError("elasticity.model_parallel_size 1, because tensor parallelism is not available")
    if block.version not in (0.1, 0.2):
        raise ValueError(f"elasticity.version 0.1 or 0.2 (got {block.version}), the rules that DeepSpeed has,")
    if block.version == 0.2:
        return _batch_of_nodes(block, world_size)
    batch, ranks = best_batch(block, block.max_train_batch_size, block.min_gpus, block.max_gpus)
    if not world_size:
        return ElasticBatch(batch, tuple(ranks), None)
    if world_size not in ranks:
        raise ValueError(f"{_list_ranks(ranks)} ranks, which share a batch of {batch}")
    return ElasticBatch(batch, tuple(ranks), _largest_micro_batch(block, batch // world_size))


def _batch_of_nodes(block: Elasticity, world_size: int) -> ElasticBatch:
    """Version 0.2: whole nodes share the batch. If the given ranks cannot, the batch is reduced to fit them."""
    node = block.num_gpus_per_node
    largest = block.max_train_batch_size // node
    most = block.max_gpus // node or largest  # Less than a node counts as no limit.
    batch, nodes = best_batch(block, largest, block.min_gpus // node, most)
    batch, ranks = batch * node, [count * node for count in nodes]
    if not world_size:
        raise ValueError("a number of ranks with version 0.2")
    if world_size not in ranks:
        cut = [block.max_train_batch_size // (m * world_size) * m * world_size for m in block.micro_batch_sizes]
        batch, ranks = (max if block.prefer_larger_batch else min)(cut), [world_size]
    if not batch:
        raise ValueError(f"micro_batch_sizes of at most {block.max_train_batch_size // world_size}")
    return ElasticBatch(batch, tuple(ranks), _largest_micro_batch(block, batch // world_size))


def _largest_micro_batch(block: Elasticity, batch_of_rank: int) -> int:
    return max(micro for micro in block.micro_batch_sizes if batch_of_rank % micro == 0)


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:12]))
    return f"{shown} or more, up to {ranks[-1]}," if len(ranks) > 12 else shown or "no number of"


def elastic_sizes(block: Elasticity, user_sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """train_batch_size and train_micro_batch_size_per_gpu, which replace `user_sizes`, the user's own batch sizes.

    Raises PydanticCustomError: the user has set some without ignoring them, or these ranks cannot share a batch.
    """
    if user_sizes and not block.ignore_non_elastic_batch_info:
        names = ", ".join(user_sizes)
        raise problem(
            f"no {names} together with elasticity",
            at=next(iter(user_sizes)),
            got=", ".join(map(str, user_sizes.values())),
            keys=tuple(user_sizes),
            fix="elasticity chooses the batch size: remove the key, or set "
            "elasticity.ignore_non_elastic_batch_info to true",
        )
    try:
        chosen = elastic_batch(block, world_size)
    except ValueError as error:
        fix = "start that many ranks, or change max_train_batch_size and micro_batch_sizes"
        raise problem(str(error), at="elasticity", got=f"{world_size} ranks", keys=("elasticity",), fix=fix) from None
    return {"train_batch_size": chosen.train_batch_size, "train_micro_batch_size_per_gpu": chosen.micro_batch_size or 1}
