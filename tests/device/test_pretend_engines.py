"""What is done around training gives the bits of the CPU too, on a device that is late."""

from __future__ import annotations

import pytest
from pretend_groups import AROUND_TRAINING, by_default
from pretend_process import needed, verdicts, wrong


@pytest.mark.parametrize("group", AROUND_TRAINING)
def test_what_is_done_around_training_has_the_bits_of_the_cpu(group: str) -> None:
    needed()
    found = verdicts(by_default(group))
    assert not wrong(found), wrong(found)
