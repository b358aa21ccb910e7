"""Activation checkpointing recomputes the forward inside backward; the numbers stay those of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import train
from models import ADAMW, build, make_config, trainability
from reference import Hyper, Reference, differences, snapshot

Open = Callable[..., Any]
STEPS = 6


def expected(model: str, engine: Any, accumulation: int) -> dict[str, Any]:
    """The reference without any checkpointing."""
    hyper = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
    plain = build(model)
    names = trainability(plain)
    reference = Reference(plain, lambda name: hyper, clipping=0.3, accumulation=accumulation)
    train(reference, *range(accumulation * STEPS))
    return snapshot(reference, names)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("model", ["gpt", "lora"])
@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("alias", [True, False], ids=["alias", "copy"])
def test_recomputation_is_bit_equal_to_a_run_without_it(
    open_engine: Open,
    nvme_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    model: str,
    recompute: str,
    alias: bool,
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    built = build(model, recompute=recompute)
    names = trainability(built)
    engine = open_engine(built, make_config((device, device), nvme_path, clipping=0.3))
    train(engine, *range(STEPS))
    assert differences(snapshot(engine, names), expected(model, engine, 1)) == []
    statistics = engine.statistics()
    assert statistics.gathered_bytes > 0
    assert all(releases >= STEPS for releases in statistics.releases_by_unit.values())


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("model", ["tied", "mixed"])
def test_recomputation_with_accumulation_tied_and_frozen_parameters(
    open_engine: Open, nvme_path: Any, model: str, recompute: str
) -> None:
    built = build(model, recompute=recompute)
    names = trainability(built)
    engine = open_engine(built, make_config(("nvme", "nvme"), nvme_path, clipping=0.3, accumulation=2))
    train(engine, *range(2 * STEPS))
    assert differences(snapshot(engine, names), expected(model, engine, 2)) == []


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
def test_a_block_used_twice_and_recomputed_keeps_the_contributions_autograd_made(
    open_engine: Open, nvme_path: Any, recompute: str
) -> None:
    """Reentrant recomputation hands over two contributions, plain autograd one: like is compared to like."""
    hyper = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
    built = build("reused", recompute=recompute)
    names = trainability(built)
    engine = open_engine(built, make_config(("nvme", "nvme"), nvme_path, clipping=0.3))
    train(engine, *range(STEPS))
    reference = Reference(build("reused", recompute=recompute), lambda name: hyper, clipping=0.3)
    train(reference, *range(STEPS))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize(
    ("model", "live_numel"),
    [
        pytest.param("gpt", 64_000, id="gpt, a block is a unit"),
        pytest.param("gpt", 40_000, id="gpt, a block is five units"),
        pytest.param("lora", 64_000, id="lora, a block is two units"),
    ],
)
@pytest.mark.parametrize("blocks", [3, 8])
def test_recomputed_units_are_released_one_by_one(
    open_engine: Open, nvme_path: Any, recompute: str, model: str, live_numel: int, blocks: int
) -> None:
    """A limit of a few blocks is enough for any depth: what was recomputed goes when its own backward is over."""
    keys = {"stage3_max_live_parameters": live_numel, "stage3_prefetch_bucket_size": 1_000_000}
    built = build(model, recompute=recompute, blocks=blocks)
    engine = open_engine(built, make_config(("nvme", "nvme"), nvme_path, zero=keys))
    train(engine, *range(STEPS))
    assert 0 < engine.statistics().live_numel_peak <= live_numel
    assert all(releases >= STEPS for releases in engine.statistics().releases_by_unit.values())
