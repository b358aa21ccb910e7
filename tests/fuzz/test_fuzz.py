"""Odd models, configurations and scripts, drawn from seeds: an engine gives the bits of the plain-torch reference.

What fails is told with its seed, a command that runs it again, and a script that was made shorter.
"""

from __future__ import annotations

import pytest
from fuzz.verdict import failures

pytestmark = pytest.mark.broad

CHUNKS = [range(first, first + 25) for first in range(0, 75, 25)]
LONG = [range(first, first + 400) for first in range(75, 75 + 10 * 400, 400)]
long = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize("chunk", [*CHUNKS, *(pytest.param(chunk, marks=long) for chunk in LONG)], ids=str)
def test_one_rank_gives_the_bits_of_the_reference(chunk: range) -> None:
    assert not (told := failures(chunk, 1)), told
