"""Training on a device that is late gives the bits of the CPU, wherever bytes live."""

from __future__ import annotations

import pytest
from pretend_groups import TRAINING, by_default
from pretend_process import all_of, wrong

pytestmark = [pytest.mark.broad, pytest.mark.timeout(1800)]  # the first of them waits for all scenarios


@pytest.mark.parametrize("group", TRAINING)
def test_training_on_a_device_that_is_late_has_the_bits_of_the_cpu(found: dict[str, str], group: str) -> None:
    own = {cell: found.get(cell, "the process ended before it") for cell in all_of(by_default(group))}
    assert not wrong(own), wrong(own)
