"""Two ranks with a device each, which is late, have the bits of two ranks on the CPU."""

from __future__ import annotations

import pytest
from pretend_groups import (
    FOUR_RANKS,
    MODES,
    OVER_HOST_BY_DEFAULT,
    RANKS,
    RANKS_BY_DEFAULT,
    ranks_by_gloo,
    ranks_everywhere,
    ranks_over_host,
)
from pretend_process import needed, verdicts_of_ranks, wrong

pytestmark = pytest.mark.broad


def same(cells: list[str], way: str, ranks: int = 2) -> None:
    needed()
    found = verdicts_of_ranks(cells, way, ranks=ranks)
    assert not wrong(found), wrong(found)


def test_two_ranks_with_a_device_each_have_the_bits_of_two_cpus() -> None:
    same(list(RANKS_BY_DEFAULT), "streams")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", RANKS)
def test_two_ranks_at_every_place_have_the_bits_of_two_cpus(group: str, mode: str) -> None:
    same(ranks_everywhere(group, mode), "streams")


@pytest.mark.slow
@pytest.mark.parametrize("group", RANKS)
def test_two_ranks_whose_collectives_are_gloos_have_the_bits_of_two_cpus(group: str) -> None:
    same(ranks_by_gloo(group), "gloo")


def test_two_ranks_that_gather_over_the_host_have_the_bits_of_two_cpus() -> None:
    same(list(OVER_HOST_BY_DEFAULT), "over_host")


@pytest.mark.slow
@pytest.mark.parametrize("group", RANKS)
def test_two_ranks_that_gather_over_the_host_have_the_bits_of_two_cpus_in_every_scenario(group: str) -> None:
    same(ranks_over_host(group), "over_host")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_four_ranks_in_groups_have_the_bits_of_four_cpus(mode: str) -> None:
    places = ("none-none", "cpu-cpu", "nvme-nvme")
    same([f"{name}:{place}:{mode}" for name in FOUR_RANKS for place in places], "streams", ranks=4)
