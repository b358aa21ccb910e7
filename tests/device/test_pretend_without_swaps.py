"""Where torch cannot swap storages, every scenario has the bits of the CPU too: the long form."""

from __future__ import annotations

import pytest
from pretend_groups import GROUPS, LONG, WITHOUT_SWAPS, by_default, everywhere
from pretend_process import needed, verdicts, wrong

pytestmark = pytest.mark.broad


@pytest.mark.parametrize("group", WITHOUT_SWAPS)
def test_training_has_the_bits_of_the_cpu_where_storages_are_copied(group: str) -> None:
    needed()
    found = verdicts(by_default(group), swaps=False)
    assert not wrong(found), wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["copies", "compute", "late", "random"])
@pytest.mark.parametrize("group", sorted(GROUPS.keys() - LONG))
def test_training_at_every_place_has_the_bits_of_the_cpu_where_storages_are_copied(group: str, mode: str) -> None:
    needed()
    found = verdicts(everywhere(group, mode), swaps=False)
    assert not wrong(found), wrong(found)
