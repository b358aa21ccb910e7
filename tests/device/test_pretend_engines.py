"""What is done around training gives the bits of the CPU too, on a device that is late."""

from __future__ import annotations

import pytest
from pretend_groups import AROUND_TRAINING, by_default
from pretend_process import all_of, wrong

pytestmark = [pytest.mark.broad, pytest.mark.timeout(1800)]  # the first of them waits for all scenarios


@pytest.mark.parametrize("group", AROUND_TRAINING)
def test_what_is_done_around_training_has_the_bits_of_the_cpu(found: dict[str, str], group: str) -> None:
    own = {cell: found.get(cell, "the process ended before it") for cell in all_of(by_default(group))}
    assert not wrong(own), wrong(own)
