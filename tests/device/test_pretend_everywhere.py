"""Every scenario at every place and in every mode has the bits of the CPU: the long form."""

from __future__ import annotations

import itertools

import pytest
from pretend_groups import FOUR_RANKS, GROUPS, LONG, OF_RANKS, everywhere
from pretend_process import needed, verdicts, wrong

pytestmark = pytest.mark.broad


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["copies", "compute", "late", "random", "eager", "copies_in", "copies_out", "updates"])
@pytest.mark.parametrize("group", GROUPS)
def test_training_at_every_place_has_the_bits_of_the_cpu(group: str, mode: str) -> None:
    needed()
    if group in LONG:
        pytest.importorskip("transformers")
    found = verdicts(everywhere(group, mode))
    assert not wrong(found), wrong(found)


def test_every_scenario_is_in_a_group() -> None:
    import pretend_rank_scenarios  # noqa: F401 (more of them)
    from pretend_scenarios import SCENARIOS

    assert sorted(SCENARIOS) == sorted(itertools.chain(*GROUPS.values(), *OF_RANKS.values(), FOUR_RANKS))
