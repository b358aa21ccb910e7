"""Where every parameter lies in the flat space, and that nothing but the model decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import build, make_config
from probe import layout_of

from offload.sizes import align_up
from zero.params.layout import Layout, Placement, SubGroup, UnitContent, build_layout
from zero.plan.plan import Limits, Plan

BLOCK = 4096
NO_LIMITS = Limits(live_numel_max=0, prefetch_numel=0, reuse_numel_max=0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

shapes = st.one_of(
    st.just(torch.Size()),
    st.lists(st.integers(0, 70), min_size=1, max_size=3).map(torch.Size),
    st.integers(4000, 20_000).map(lambda n: torch.Size((n,))),
)
contents_strategy = st.lists(
    st.tuples(st.lists(shapes, min_size=1, max_size=5), st.sampled_from(DTYPES), st.booleans(), st.booleans()),
    max_size=9,
)
worlds = st.sampled_from([1, 2, 3, 8])


def among(world: int) -> Placement:
    """The first of `world` ranks that share everything."""
    return Placement(world_size=world, shard_size=world)


def contents_of(drawn: list[tuple[list[torch.Size], torch.dtype, bool, bool]]) -> list[UnitContent]:
    contents, index = [], 0
    for number, (unit_shapes, dtype, trainable, persistent) in enumerate(drawn):
        parameters = []
        for shape in unit_shapes:
            parameters.append((index, (f"p{index}", f"tied{index}"), shape))
            index += 1
        contents.append(UnitContent(f"u{number}", tuple(parameters), dtype, trainable, persistent))
    return contents


@given(contents_strategy, worlds)
def test_every_parameter_has_exactly_one_place_of_its_own(drawn: Any, world: int) -> None:
    contents = contents_of(drawn)
    layout = build_layout(contents, among(world))
    placed = [(slot.index, slot.names, slot.shape) for unit in layout.units for slot in unit.slots]
    assert placed == [parameter for content in contents for parameter in content.parameters]
    for unit, content in zip(layout.units, contents, strict=True):
        assert (unit.name, unit.dtype, unit.trainable, unit.persistent) == (
            content.name,
            content.dtype,
            content.trainable,
            content.persistent,
        )
        for before, after in pairwise(unit.slots):
            assert before.end_numel <= after.offset_numel
        assert all(slot.numel == slot.shape.numel() for slot in unit.slots)
        assert all(0 <= slot.offset_numel <= slot.end_numel <= unit.numel for slot in unit.slots)
    assert sum(unit.numel for unit in layout.units) == layout.numel


@given(contents_strategy, worlds)
def test_parameters_start_at_64_bytes_and_waste_less_than_that(drawn: Any, world: int) -> None:
    for unit in build_layout(contents_of(drawn), among(world)).units:
        end = 0
        for slot in unit.slots:
            assert slot.offset_numel * unit.dtype.itemsize % 64 == 0
            assert 0 <= (slot.offset_numel - end) * unit.dtype.itemsize < 64
            end = slot.end_numel


@given(contents_strategy, worlds)
def test_rank_slices_tile_the_unit_in_whole_blocks(drawn: Any, world: int) -> None:
    for unit in build_layout(contents_of(drawn), among(world)).units:
        assert unit.shard_numel > 0 and unit.shard_numel % BLOCK == 0
        assert unit.shard_numel * world == unit.numel
        assert unit.numel - unit.slots[-1].end_numel < BLOCK * world or unit.numel == BLOCK * world
        assert unit.nbytes == unit.numel * unit.dtype.itemsize


@given(contents_strategy, worlds)
def test_spaces_are_homogeneous_and_their_coordinates_contiguous(drawn: Any, world: int) -> None:
    layout = build_layout(contents_of(drawn), among(world))
    assert len({(space.dtype, space.trainable) for space in layout.spaces}) == len(layout.spaces)
    assert sorted(u.index for space in layout.spaces for u in space.units) == [u.index for u in layout.units]
    for position, space in enumerate(layout.spaces):
        end = 0
        for unit in space.units:
            assert (unit.dtype, unit.trainable) == (space.dtype, space.trainable)
            assert layout.space_of(unit) == position
            assert unit.begin == end
            end = unit.end
        assert space.numel == end


@given(contents_strategy, worlds, st.integers(0, 60_000), st.integers(0, 60_000))
def test_overlapping_finds_the_units_that_share_a_coordinate(drawn: Any, world: int, a: int, b: int) -> None:
    begin, end = min(a, b), max(a, b) + 1
    for space in build_layout(contents_of(drawn), among(world)).spaces:
        shared = [u for u in space.units if set(range(u.begin, u.end, BLOCK)) & block_starts(begin, end)]
        assert list(space.units_between(begin, end)) == shared


def block_starts(begin: int, end: int) -> set[int]:
    """First coordinates of the blocks that [begin, end) touches; units consist of whole blocks."""
    return set(range(begin // BLOCK * BLOCK, end, BLOCK))


@given(contents_strategy, worlds, st.integers(0, 100_000))
def test_sub_groups_tile_every_trained_space_for_any_size(drawn: Any, world: int, numel_max: int) -> None:
    layout = build_layout(contents_of(drawn), among(world))
    groups = layout.sub_groups(numel_max)
    for index, space in enumerate(layout.spaces):
        mine = [group for group in groups if group.space == index]
        if not space.trainable:
            assert mine == []
            continue
        assert mine[0].begin == 0 and mine[-1].end == space.numel
        assert all(before.end == after.begin for before, after in pairwise(mine))
        for group in mine:
            assert group.begin % BLOCK == 0
            assert 0 < group.end - group.begin <= max(numel_max, BLOCK)


@given(contents_strategy, worlds, st.integers(0, 30_000), st.integers(0, 60_000), st.integers(0, 30_000))
def test_the_sub_groups_over_a_range_are_those_that_share_a_coordinate(
    drawn: Any, world: int, numel_max: int, begin: int, numel: int
) -> None:
    layout = build_layout(contents_of(drawn), among(world))
    plan = Plan(NO_LIMITS, sub_groups=layout.sub_groups(numel_max))
    for space in range(len(layout.spaces)):
        mine = [group for group in plan.sub_groups if group.space == space]
        shared = [group for group in mine if max(begin, group.begin) < min(begin + numel, group.end)]
        assert list(plan.groups_over(space, begin, begin + numel)) == shared


class Counted(tuple[SubGroup, ...]):
    """It counts the sub-groups that are looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        for group in super().__iter__():
            Counted.looks += 1
            yield group


def test_a_parameter_is_found_without_a_look_at_every_sub_group(open_engine: Callable[..., Any]) -> None:
    config = make_config(("cpu", "cpu"), None, zero={"sub_group_size": BLOCK})
    engine = open_engine(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), config)
    assert len(engine.plan.sub_groups) > 60
    engine.plan.sub_groups = Counted(engine.plan.sub_groups)
    for read in (engine.full_master, engine.full_state):
        Counted.looks = 0
        read("3.bias")
        assert 0 < Counted.looks < 20, "a binary search looks at seven"


@given(contents_strategy, worlds, st.integers(0, 100_000))
@example([([torch.Size([]), torch.Size([]), torch.Size([]), torch.Size([0])], torch.float32, False, False)], 3, 0)
def test_what_is_looked_at_whole_lies_in_one_slice_and_one_sub_group(drawn: Any, world: int, numel_max: int) -> None:
    contents = [replace(content, needs_whole_parameters=True, trainable=True) for content in contents_of(drawn)]
    cuts = []
    for rank in range(world):
        layout = build_layout(contents, replace(among(world), rank=rank))
        groups = layout.sub_groups(numel_max)
        cuts.append([(group.space, group.begin, group.end) for group in groups])
        for unit, content in zip(layout.units, contents, strict=True):
            assert sorted(slot.index for slot in unit.slots) == [index for index, _, _ in content.parameters]
            for before, after in pairwise(unit.slots):
                assert before.end_numel <= after.offset_numel
            mine = [slot for slot in unit.slots if slot.numel and unit.shard_range(slot)[0] < unit.shard_range(slot)[1]]
            for slot in mine:
                begin, end = unit.shard_range(slot)
                assert end - begin == slot.numel and begin % BLOCK == 0
                assert sum(g.begin <= begin and end <= g.end for g in layout_groups(layout, unit, groups)) == 1
            sizes = [align_up(slot.numel, BLOCK) for slot in unit.slots]
            assert unit.shard_numel <= max(BLOCK, max(sizes) + sum(sizes) // world), "the fullest slice is not fuller"
        for index in range(len(layout.spaces)):
            mine = [group for group in groups if group.space == index]
            assert mine[0].begin == 0 and mine[-1].end == layout.spaces[index].numel
            assert all(before.end == after.begin for before, after in pairwise(mine))
            assert max(g.end - g.begin for g in mine) <= layout.longest_sub_group(
                index, max(numel_max // BLOCK, 1) * BLOCK
            )
    assert all(each == cuts[0] for each in cuts), "ranks have the same sub-groups"


def layout_groups(layout: Layout, unit: Any, groups: Any) -> list[Any]:
    """Those of the unit's space."""
    return [group for group in groups if group.space == layout.space_of(unit)]


@given(contents_strategy)
def test_a_rank_owns_the_same_share_of_every_unit(drawn: Any) -> None:
    contents = contents_of(drawn)
    one, four = build_layout(contents, among(1)), build_layout(contents, among(4))
    for whole, shared in zip(one.units, four.units, strict=True):
        assert whole.slots == shared.slots, "the world size pads a unit's end, it moves no parameter"
        assert whole.numel <= shared.numel < whole.numel + 4 * BLOCK


def layout_under(open_engine: Callable[..., Any], config: dict[str, Any], **sizes: Any) -> Layout:
    return layout_of(open_engine(build("mixed", **sizes), config))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("pair", "keys", "budget"),
    [
        (("none", "none"), {}, {}),
        (("cpu", "nvme"), {}, {}),
        (("nvme", "cpu"), {}, {"host": "50MB"}),
        (("nvme", "nvme"), {"sub_group_size": 4096}, {}),
        (("nvme", "nvme"), {"sub_group_size": 1e9}, {"host": "100MB"}),
        (("nvme", "nvme"), {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, {"device": "20MB"}),
        (("nvme", "nvme"), {"offload_optimizer": {"buffer_count": 2}, "offload_param": {"max_in_cpu": 10_000}}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("live", [60_000, None], ids=["live limit", "derived"])
def test_tiers_budgets_and_sub_groups_never_move_a_parameter(
    open_engine: Callable[..., Any], nvme_path: Any, pair: Any, keys: Any, budget: Any, live: int | None
) -> None:
    def config(pair: tuple[str, str], keys: dict[str, Any], **top: Any) -> dict[str, Any]:
        made = make_config(pair, nvme_path, zero=keys, **top)
        if live is None:
            del made["zero_optimization"]["stage3_max_live_parameters"]
        return made

    expected = layout_under(open_engine, config(("nvme", "nvme"), {}))
    if live is None:
        budget = {key: value for key, value in budget.items() if key == "host"}
    got = layout_under(open_engine, config(pair, keys, **({"memory_budget": budget} if budget else {})))
    assert got == expected


def test_only_explicit_keys_of_the_layout_change_it(open_engine: Callable[..., Any], nvme_path: Any) -> None:
    base = layout_under(open_engine, make_config(("nvme", "nvme"), nvme_path))
    limit = layout_under(
        open_engine, make_config(("nvme", "nvme"), nvme_path, zero={"stage3_max_live_parameters": 26_000})
    )
    assert len(limit.units) > len(base.units)
    persistent = layout_under(
        open_engine, make_config(("nvme", "nvme"), nvme_path, zero={"stage3_param_persistence_threshold": 32})
    )
    assert any(unit.persistent for unit in persistent.units) and not any(unit.persistent for unit in base.units)
    plain = [replace(u, begin=0, index=0) for u in base.units]
    assert plain != [replace(u, begin=0, index=0) for u in persistent.units]
