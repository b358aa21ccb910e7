"""Elastic batch sizes: DeepSpeed's numbers, and what they promise to every number of ranks."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero.compat import elasticity as theirs
from zero.config import load_config
from zero.config.elasticity import HIGHLY_COMPOSITE, Elasticity, elastic_batch

LARGE = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
KNOWN = (32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224)
"""Numbers of ranks that DeepSpeed's own test of this block expects, with a batch of 9792."""


def config(**block: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, **block}}


def test_the_numbers_are_deepspeeds() -> None:
    assert theirs.compute_elastic_config(config(**LARGE)) == (9792, list(KNOWN))
    assert theirs.compute_elastic_config(config(**LARGE), world_size=64) == (9792, list(KNOWN), 17)
    seven = config(max_train_batch_size=32, micro_batch_sizes=[1, 2, 3, 7], min_gpus=1, max_gpus=1500)
    assert theirs.compute_elastic_config(seven, world_size=8)[2] == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(40, 5000),
    st.integers(1, 8),
    st.integers(8, 200),
    st.booleans(),
)
def test_all_ranks_that_are_named_share_the_batch_and_no_others_can(
    sizes: list[int], largest: int, fewest: int, most: int, larger: bool
) -> None:
    block = Elasticity(
        max_train_batch_size=largest,
        micro_batch_sizes=tuple(sizes),
        min_gpus=fewest,
        max_gpus=most,
        prefer_larger_batch=larger,
    )
    chosen = elastic_batch(block)
    batch = chosen.train_batch_size
    assert batch <= largest
    assert chosen.ranks == tuple(n for n in range(fewest, most + 1) if any(batch % (m * n) == 0 for m in sizes))
    for ranks in chosen.ranks[:4]:
        micro = elastic_batch(block, ranks).micro_batch_size
        assert micro in sizes and batch % (micro * ranks) == 0


def test_highly_composite_numbers_have_more_divisors_than_every_smaller_one() -> None:
    def divisors(number: int) -> int:
        return sum(2 if k * k < number else 1 for k in range(1, math.isqrt(number) + 1) if number % k == 0)

    counts = [divisors(number) for number in HIGHLY_COMPOSITE]
    assert counts == sorted(set(counts))


def test_every_number_of_ranks_trains_with_the_same_batch() -> None:
    found = [load_config(config(**LARGE), world_size=ranks) for ranks in KNOWN]
    assert {each.train_batch_size for each in found} == {9792}
    for ranks, each in zip(KNOWN, found, strict=True):
        assert each.train_micro_batch_size_per_gpu * each.gradient_accumulation_steps * ranks == 9792


def test_whole_nodes_share_the_batch_and_where_they_cannot_it_is_cut() -> None:
    block = {"max_train_batch_size": 96, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 4, "version": 0.2}
    batch, ranks, micro = theirs.compute_elastic_config(config(**block), world_size=8)
    assert all(number % 4 == 0 for number in ranks) and 8 in ranks and batch % (micro * 8) == 0 and batch <= 96
    cut, ranks, micro = theirs.compute_elastic_config(config(**block, min_gpus=4, max_gpus=8), world_size=20)
    assert (cut, ranks, micro) == (80, [20], 4)
    with pytest.raises(theirs.ElasticityConfigError, match="a number of ranks with version"):
        theirs.compute_elastic_config(config(**block))


def test_ranks_that_are_not_given_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config(max_train_batch_size=96, micro_batch_sizes=[2, 4], num_gpus_per_node=4, version=0.2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert theirs.compute_elastic_config(whole) == theirs.compute_elastic_config(whole, world_size=8)[:2]
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert theirs.compute_elastic_config(config(**LARGE), return_microbatch=True)[2] == 17
    for word in ("", "0", "many"):
        monkeypatch.setenv("WORLD_SIZE", word)
        with pytest.raises(theirs.ElasticityConfigError, match="pass world_size, or set the variable"):
            theirs.compute_elastic_config(config(**LARGE), return_microbatch=True)


class Rule:
    """DeepSpeed's present rule, tried out number by number."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.sizes, self.limit = block["micro_batch_sizes"], block["max_train_batch_size"]
        self.larger, self.node = block["prefer_larger_batch"], block["num_gpus_per_node"]
        self.range = block["min_gpus"], block["max_gpus"]
        self.by_nodes = block["version"] == 0.2

    def chooses(self, ranks: int) -> tuple[int, list[int], int] | None:
        """Batch, numbers of ranks and micro-batch; None: there is no choice."""
        node = self.node if self.by_nodes else 1
        limit, fewest, most = self.limit // node, max(self.range[0] // node, 1), self.range[1] // node
        if max(self.sizes) > limit:
            return None
        batch, shared = self._most_shared(limit, fewest, most or limit)
        batch, numbers = batch * node, [count * node for count in shared]
        if ranks not in numbers:
            if not self.by_nodes:
                return None
            cut = [max(n for n in range(0, self.limit + 1, size * ranks)) for size in self.sizes]
            batch, numbers = max(cut) if self.larger else min(cut), [ranks]
        return (batch, numbers, max(m for m in self.sizes if batch // ranks % m == 0)) if batch else None

    def _most_shared(self, limit: int, fewest: int, most: int) -> tuple[int, list[int]]:
        shared = {}
        for base in {*self.sizes, math.lcm(*self.sizes)}:
            if base <= limit:
                batch = max(base * number for number in HIGHLY_COMPOSITE if base * number <= limit)
                among = range(fewest, min(most, batch) + 1)
                shared[batch] = [n for n in among if any(batch % (size * n) == 0 for size in self.sizes)]
        return max(shared.items(), key=lambda item: (len(item[1]), item[0] if self.larger else -item[0]))


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_thousands_of_blocks_choose_as_deepspeeds_rule_does(version: float) -> None:
    draw, chosen = random.Random(20260809), 0
    for _ in range(2000):
        block = {
            "max_train_batch_size": draw.choice([draw.randint(20, 600), draw.randint(20, 3000)]),
            "micro_batch_sizes": [draw.randint(1, 40) for _ in range(draw.randint(1, 6))],
            "min_gpus": draw.choice([1, 1, draw.randint(1, 12)]),
            "max_gpus": draw.choice([10000, draw.randint(1, 200)]),
            "prefer_larger_batch": draw.random() < 0.6,
            "num_gpus_per_node": draw.choice([1, 2, 4, 8]),
            "version": version,
        }
        ranks = draw.choice([1, 2, 4, 8, draw.randint(1, 64)])
        expected = Rule(block).chooses(ranks)
        try:
            batch = elastic_batch(Elasticity.model_validate(block), ranks)
            got = batch.train_batch_size, list(batch.ranks), batch.micro_batch_size
        except ValueError:
            got = None
        assert got == expected, (block, ranks)
        assert got is None or got[0] <= block["max_train_batch_size"]
        chosen += got is not None
    assert chosen > 1000


def test_the_blocks_that_were_reported_stay_within_their_limit() -> None:
    large = Elasticity(max_train_batch_size=544, micro_batch_sizes=(28, 33, 13, 20, 19))
    assert elastic_batch(large).train_batch_size <= 544
    small = config(max_train_batch_size=598, micro_batch_sizes=[29, 32])
    assert load_config(small, world_size=2).train_batch_size == 384


@pytest.mark.parametrize(
    ("content", "ranks", "message"),
    [
        (config(**LARGE), 33, "elasticity: expected 32, 34, 36.*got 33 ranks"),
        (
            {**config(**LARGE), "train_batch_size": 64},
            32,
            "expected no train_batch_size together with elasticity, got 64",
        ),
        (
            config(max_train_batch_size=4, micro_batch_sizes=[8]),
            1,
            "micro_batch_sizes of at most max_train_batch_size, 4",
        ),
        (config(micro_batch_sizes=[0]), 1, "sizes of at least 1"),
        (config(micro_batch_sizes=2), 1, "a list of sizes"),
        (config(model_parallel_size=2), 1, "tensor parallelism is not available"),
        (config(version=0.3), 1, r"expected elasticity.version 0.1 or 0.2 \(got 0.3\)"),
    ],
)
def test_what_cannot_be_is_refused(content: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(content, world_size=ranks)


def test_batch_sizes_beside_it_are_passed_over_if_the_user_says_so() -> None:
    content = {**config(**LARGE, ignore_non_elastic_batch_info=True), "train_batch_size": 64}
    assert load_config(content, world_size=32).train_batch_size == 9792


def test_the_alias_says_what_is_missing_and_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert theirs.elasticity_enabled(config()) and not theirs.elasticity_enabled({})
    with pytest.raises(theirs.ElasticityConfigError, match="expected a block with enabled set to true"):
        theirs.compute_elastic_config({"elasticity": {"enabled": False}})
    with pytest.raises(theirs.ElasticityConfigError, match="max_train_batch_size: missing"):
        theirs.compute_elastic_config(config(micro_batch_sizes=[2]))
    with pytest.raises(theirs.ElasticityConfigError, match="unknown key"):
        theirs.compute_elastic_config(config(**LARGE, max_gpuss=3))
    with pytest.raises(theirs.ElasticityIncompatibleWorldSize, match="got 128 ranks"):
        theirs.compute_elastic_config(config(**LARGE), world_size=128)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(LARGE))
    theirs.ensure_immutable_elastic_config(LARGE)
    with pytest.raises(theirs.ElasticityConfigError, match="expected 10000, as in DEEPSPEED_ELASTICITY_CONFIG"):
        theirs.ensure_immutable_elastic_config({**LARGE, "max_train_batch_size": 9000})
