"""As `test_fuzz`, on two ranks: wherever bytes live, they give the bits of a reference that adds up in their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz.verdict import failures
from ranks import RankPool

pytestmark = pytest.mark.broad

CHUNKS = [range(first, first + 12) for first in range(0, 24, 12)]
LONG = [range(first, first + 80) for first in range(24, 24 + 20 * 80, 80)]
FOUND = [range(seed, seed + 1) for seed in (600, 831, 1455)]
"""Of the long ones: they have failed once."""
long = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize("chunk", [*CHUNKS, *FOUND, *(pytest.param(chunk, marks=long) for chunk in LONG)], ids=str)
def test_two_ranks_give_the_bits_of_the_reference(rank_pool: Callable[[int], RankPool], chunk: range) -> None:
    assert not (told := failures(chunk, 2, rank_pool)), told
