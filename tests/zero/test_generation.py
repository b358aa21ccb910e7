"""Generation: `generate` of transformers gives the plain model's tokens, and weights stay from token to token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from generating import NEW_TOKENS, WAYS, generated, llama, t5, train
from hypothesis import given
from hypothesis import strategies as st
from models import build, make_config, tokens, trainability
from reference import differences, snapshot
from torch import nn

from offload.errors import StateError
from zero.cache.policy import STREAMED_AT_ONCE, HotUnits

pytest.importorskip("transformers")

Open = Callable[..., Any]
TIERS = ["none", "cpu", "nvme"]
MANY = 10**9


def config_for(tier: str, nvme_path: Any, **more: Any) -> dict[str, Any]:
    return make_config((tier, tier), nvme_path, bf16=False, **more)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("make", [llama, t5])
def test_generate_gives_the_tokens_of_the_plain_model(
    make: Callable[[], nn.Module], tier: str, nvme_path: Any, open_engine: Open
) -> None:
    model = make()
    wanted = {way: generated(copy.deepcopy(model), way) for way in WAYS}
    assert len({tuple(t.flatten().tolist()) for t in wanted.values()}) > 1, "the ways do not differ: nothing is tested"
    engine = open_engine(model, config_for(tier, nvme_path))
    for way in WAYS:
        assert torch.equal(generated(engine, way), wanted[way])
        assert torch.equal(generated(engine.module, way), wanted[way])
        with engine.generation():
            assert torch.equal(generated(engine, way), wanted[way])
            assert torch.equal(generated(engine.module, way), wanted[way])
    assert engine.statistics().gathered_bytes > 0


@pytest.mark.parametrize("tier", TIERS)
def test_when_the_weights_fit_a_token_fetches_nothing(tier: str, nvme_path: Any, open_engine: Open) -> None:
    engine = open_engine(llama(), config_for(tier, nvme_path, zero={"stage3_max_live_parameters": MANY}))
    weights = sum(unit.nbytes for unit in engine.units)
    with engine.generation():
        before = engine.statistics()
        generated(engine, "greedy", 1)
        first = engine.statistics()
        generated(engine, "greedy", NEW_TOKENS)
        after = engine.statistics()
    assert first.gathered_bytes - before.gathered_bytes == weights
    assert after.gathered_bytes == first.gathered_bytes
    assert after.nvme_read_bytes == first.nvme_read_bytes
    assert after.prefetch_hits > first.prefetch_hits and after.prefetch_misses == first.prefetch_misses
    engine.eval()
    generated(engine, "greedy", 1)
    # The next evaluation's first units are on their way already.
    assert engine.statistics().gathered_bytes - after.gathered_bytes >= weights, "kept beyond the generation"


def test_what_does_not_fit_is_streamed_and_the_rest_stays(nvme_path: Any, open_engine: Open) -> None:
    layers, fitting = 12, 9
    model = llama(layers)
    block = 4096 * -(-sum(p.numel() for p in model.model.layers[0].parameters()) // 4096)
    limit = fitting * block
    zero = {"stage3_max_live_parameters": limit, "stage3_prefetch_bucket_size": block}
    engine = open_engine(model, config_for("nvme", nvme_path, zero=zero))
    assert [u.numel for u in engine.units if ".layers." in u.name] == [block] * layers
    weights = sum(unit.numel for unit in engine.units)
    with engine.generation():
        generated(engine, "greedy", 3)
        before = engine.statistics()
        generated(engine, "greedy", NEW_TOKENS)
        after = engine.statistics()
    per_token = (after.nvme_read_bytes - before.nvme_read_bytes) / NEW_TOKENS
    # Room for the two largest of the streamed units is left; less than one more of them may be left over beside it.
    assert per_token <= 4 * (weights - limit + (STREAMED_AT_ONCE + 1) * block)
    assert per_token >= 4 * (weights - limit)
    assert after.live_numel_peak <= limit
    uses = [a - b for a, b in zip(of_uses(after), of_uses(before), strict=True)]
    assert uses[2] <= 0.05 * sum(uses), "the next token's first units were not foreseen"


def of_uses(statistics: Any) -> tuple[int, int, int]:
    return statistics.prefetch_hits, statistics.prefetch_late, statistics.prefetch_misses


@pytest.mark.parametrize("tier", TIERS)
def test_training_goes_on_as_if_nothing_had_been_generated(tier: str, nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    names = trainability(model)
    held = []
    for generates in (False, True):
        engine = open_engine(copy.deepcopy(model), config_for(tier, nvme_path, clipping=1.0))
        for step in range(4):
            train(engine, step)
            if generates:
                with engine.generation() if step % 2 else nullcontext():
                    generated(engine, list(WAYS)[step % 3])
        held.append(snapshot(engine, names))
        engine.close()
    assert differences(held[1], held[0]) == []


@pytest.mark.parametrize("tier", TIERS)
def test_updates_behind_the_step_are_taken_before_a_token(tier: str, nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    engine = open_engine(model, config_for(tier, nvme_path))
    for inside in (False, True):
        train(engine, 0)  # generating comes straight after the step, whose updates are still due
        with engine.generation() if inside else nullcontext():
            ours = generated(engine, "greedy")
        with torch.no_grad():
            for name, value in engine.named_full_parameters():
                plain.get_parameter(name).copy_(value)
        assert torch.equal(ours, generated(plain, "greedy"))


def test_a_step_inside_a_generation_lets_go_of_the_old_values(nvme_path: Any, open_engine: Open) -> None:
    model = llama()
    names = trainability(model)
    held = []
    for generates in (False, True):
        engine = open_engine(copy.deepcopy(model), config_for("nvme", nvme_path))
        with engine.generation() if generates else nullcontext():
            for step in range(3):
                train(engine, step)
                if generates:
                    generated(engine, "greedy", 2)
        held.append(snapshot(engine, names))
        engine.close()
    assert differences(held[1], held[0]) == []


def test_a_generation_that_raises_leaves_an_engine_that_trains(nvme_path: Any, open_engine: Open) -> None:
    engine = open_engine(build("stumbling"), make_config(("nvme", "nvme"), nvme_path))
    engine.eval()
    for error in (KeyboardInterrupt, RuntimeError):

        def stumble(*_: Any, error: Any = error) -> None:
            raise error("in the middle")

        handle = engine.module.blocks[1].up.register_forward_hook(stumble)
        with pytest.raises(error), engine.generation(), engine.generation(), torch.no_grad():
            engine.module(tokens(0))
        handle.remove()
    engine.train()
    engine.backward(engine(tokens(0)))
    engine.step()
    engine.synchronize()
    assert all(count > 0 for count in engine.statistics().releases_by_unit.values())


def test_a_closed_engine_generates_nothing(nvme_path: Any, open_engine: Open) -> None:
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path))
    engine.close()
    with pytest.raises(StateError, match="generation: the engine is closed"), engine.generation():
        pass


def test_train_eval_and_generate_in_turns_find_their_units(nvme_path: Any, open_engine: Open) -> None:
    engine = open_engine(llama(), config_for("nvme", nvme_path))

    def round_of(step: int) -> None:
        train(engine, step)
        engine.eval()
        with torch.no_grad():
            engine(input_ids=tokens(step), use_cache=False)
        with engine.generation():
            generated(engine, "greedy", 3)

    for step in range(3):
        round_of(step)
    before = of_uses(engine.statistics())
    for step in range(3):
        round_of(step)
    hits, late, misses = (a - b for a, b in zip(of_uses(engine.statistics()), before, strict=True))
    assert hits + late >= 0.95 * (hits + late + misses), (hits, late, misses)


# ---- the policy alone ---------------------------------------------------------------------------------------------


def nothing(unit: int) -> bool:
    """No unit is in use."""
    return False


@given(
    numels=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    extra=st.integers(0, 40),
    uses=st.lists(st.integers(0, 11), max_size=60),
)
def test_what_is_kept_leaves_room_for_what_is_streamed(numels: list[int], extra: int, uses: list[int]) -> None:
    limit = max(numels) + extra
    numel = dict(enumerate(numels))
    hot = HotUnits(numel)
    hot.begin_generation(limit)
    for use in uses:
        unit = use % len(numels)
        hot.note_use(unit)
        leave = hot.try_pin(unit, nothing)
        assert leave is None or unit in hot.pinned
        assert not set(leave or ()) & hot.pinned
        rest = sorted((n for u, n in numel.items() if u not in hot.pinned), reverse=True)
        room = min(STREAMED_AT_ONCE * rest[0], sum(rest)) if rest else 0
        assert not hot.pinned or sum(numel[u] for u in hot.pinned) + room <= limit
    assert hot.end_generation() is not None and not hot.pinned


@given(st.integers(3, 12), st.integers(1, 12), st.integers(2, 5))
def test_of_a_cycle_of_equal_units_as_many_stay_as_fit(units: int, fitting: int, rounds: int) -> None:
    hot = HotUnits(dict.fromkeys(range(units), 1))
    hot.begin_generation(fitting)
    kept: list[set[int]] = []
    for _ in range(rounds):
        for unit in range(units):
            hot.note_use(unit)
            hot.try_pin(unit, nothing)
        kept.append(set(hot.pinned))
    assert len(kept[0]) == (units if fitting >= units else max(fitting - STREAMED_AT_ONCE, 0))
    assert all(k == kept[0] for k in kept), "a cycle gains nothing from exchanging one unit for another"


def test_a_unit_used_far_more_often_takes_the_place_of_another() -> None:
    hot = HotUnits(dict.fromkeys(range(6), 1))
    hot.begin_generation(4)
    for encoder in (0, 1):
        hot.note_use(encoder)
        assert hot.try_pin(encoder, nothing) == ()
    for _ in range(3):
        for decoder in (2, 3):
            hot.note_use(decoder)
            hot.try_pin(decoder, nothing)
    assert hot.pinned == {2, 3}


def test_nothing_is_kept_outside_a_generation() -> None:
    hot = HotUnits({0: 1})
    hot.note_use(0)
    assert hot.try_pin(0, nothing) is None and not hot.pinned


def test_a_large_unit_takes_the_place_of_smaller_ones_where_more_stays_then() -> None:
    """Eight layers and a table that is used last: while it is streamed, twice its size has to be free."""
    numel = {**dict.fromkeys(range(8), 10), 8: 25}
    hot = HotUnits(numel)
    hot.begin_generation(90)
    for _ in range(3):
        for unit in numel:
            hot.note_use(unit)
            hot.try_pin(unit, nothing)
        kept = set(hot.pinned)
    assert 8 in kept and sum(numel[unit] for unit in kept) == 65
    assert kept == hot.pinned
