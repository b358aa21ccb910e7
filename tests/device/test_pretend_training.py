"""Training on a device that is late gives the bits of the CPU, wherever bytes live."""

from __future__ import annotations

import pytest
from pretend_groups import TRAINING, by_default
from pretend_process import needed, verdicts, wrong


@pytest.mark.parametrize("group", TRAINING)
def test_training_on_a_device_that_is_late_has_the_bits_of_the_cpu(group: str) -> None:
    needed()
    found = verdicts(by_default(group))
    assert not wrong(found), wrong(found)
