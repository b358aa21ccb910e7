"""How many elements a step moves between ranks: twice the parameters below stage 3, three times at stage 3.

Counted are the elements of what a collective handles: P for a reduce-scatter or an all-gather of P, 2 P for an
all-reduce. The model has no padding; that of others, and persistent units, are counted apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded
from pairwise import each_once
from ranks import RankPool
from ranks_model import Motley, batch, motley
from ranks_runs import Place, Run, engine_config, quiet
from torch import Tensor, nn

Pool = Callable[[int], RankPool]

WIDTH, LAYERS = 128, 5
"""A layer has 16384 elements: four slices of 4096, so that nothing is padded on up to four ranks."""
UNIT_NUMEL = WIDTH * WIDTH
KEYS = (("stage3_max_live_parameters", 4 * UNIT_NUMEL), ("stage3_prefetch_bucket_size", UNIT_NUMEL))
WARM_STEPS, STEPS = 3, 4


class Even(nn.Module):
    """Layers of the same size, the norms between them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def step(engine: Any, index: int) -> None:
    model = engine.module
    x = batch(index, 0) if isinstance(model, Motley) else torch.randn(3, WIDTH)
    engine.backward(engine(x))
    engine.step()


def moved(place: Place, accumulation: int, build: str) -> tuple[dict[str, float], list[tuple[int, int, bool, bool]]]:
    """Elements that a step moves, by what for; and of each unit (elements, padding, trained, persistent)."""
    import zero

    quiet()
    with seeded(dist.get_rank()):
        model: nn.Module = Even() if build == "even" else motley()
    config = engine_config(Run(accumulation=accumulation), place, "")
    with zero.initialize(model=model, config=config)[0] as engine:
        for index in range(WARM_STEPS * accumulation):
            step(engine, index)
        engine.synchronize()
        before = engine.statistics().payload_numel
        for index in range(STEPS * accumulation):
            step(engine, index)
        engine.synchronize()
        after = engine.statistics().payload_numel
        units = [
            (unit.numel, unit.numel - sum(slot.numel for slot in unit.slots), unit.trainable, unit.persistent)
            for unit in engine.units
        ]
    return {kind: (numel - before.get(kind, 0)) / STEPS for kind, numel in after.items()}, units


@each_once(stage=(3, 0, 1, 2), ranks=(4, 2))
def test_a_step_moves_twice_the_parameters_and_three_times_at_stage_3(rank_pool: Pool, stage: int, ranks: int) -> None:
    told = rank_pool(ranks).run(moved, Place(stage, shared=False, more=KEYS), 1, "even")
    assert all(answer == told[0] for answer in told)
    payload, units = told[0]
    assert sum(padding for _, padding, _, _ in units) == 0
    parameters = LAYERS * UNIT_NUMEL
    assert sum(numel for numel, *_ in units) == parameters
    # At stage 3 the last layer's weights are still there when backward begins with it.
    expected = 2 * parameters if stage < 3 else 3 * parameters - UNIT_NUMEL
    assert sum(payload.values()) == expected, payload
    reduced = sum(numel for kind, numel in payload.items() if kind.startswith("reduce"))
    assert reduced == parameters, payload


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_does_not_train_is_reduced_at_no_stage_and_gathered_at_stage_3_alone(rank_pool: Pool, stage: int) -> None:
    payload, units = rank_pool(2).run(moved, Place(stage, shared=False), 1, "motley")[0]
    trained = sum(numel for numel, _, trainable, _ in units if trainable)
    reduced = sum(numel for kind, numel in payload.items() if kind.startswith("reduce"))
    assert 0 < reduced < trained, payload  # what nobody uses has no gradient
    frozen = sum(numel for numel, _, trainable, _ in units if not trainable)
    gathered = sum(payload.values()) - reduced
    assert reduced <= gathered <= trained if stage < 3 else gathered > reduced + frozen, payload


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_reduces_once_a_step_where_gradients_are_not_sharded(rank_pool: Pool, stage: int) -> None:
    payload, _ = rank_pool(2).run(moved, Place(stage, shared=False, more=KEYS), 3, "even")[0]
    parameters = LAYERS * UNIT_NUMEL
    reduced = sum(numel for kind, numel in payload.items() if kind.startswith("reduce"))
    assert reduced == (parameters if stage < 2 else 3 * parameters), payload


def test_persistent_units_are_gathered_once_a_step_and_counted_apart(rank_pool: Pool) -> None:
    persistent = (*KEYS, ("stage3_param_persistence_threshold", 2 * UNIT_NUMEL))
    payload, units = rank_pool(2).run(moved, Place(3, shared=False, more=persistent), 1, "even")[0]
    assert all(persistent for *_, persistent in units)
    parameters = LAYERS * UNIT_NUMEL
    assert payload == {"gather persistent": parameters, "reduce": parameters}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_in_shared_memory_no_collective_moves_a_weight_or_a_gradient(rank_pool: Pool, stage: int) -> None:
    payload, _ = rank_pool(2).run(moved, Place(stage, shared=True, more=KEYS), 1, "even")[0]
    assert sum(payload.values()) == 0, payload


def sent_with(keys: dict[str, Any], shared: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Masters after a step, and lines of the log about keys that do nothing."""
    import zero

    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("zero")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        config = engine_config(Run(), Place(2, shared=shared), "")
        with seeded(dist.get_rank()), zero.initialize(model=Even(), config={**config, **keys})[0] as engine:
            step(engine, 0)
            masters = {name: engine.full_master(name) for name, _ in engine.named_full_parameters()}
    finally:
        logger.removeHandler(handler)
    return masters, [line for line in lines if "no effect here" in line]


def test_keys_about_what_is_sent_change_nothing_in_shared_memory_and_say_so(rank_pool: Pool) -> None:
    keys = {"communication_data_type": "bf16", "gradient_predivide_factor": 3.0}
    pool = rank_pool(2)
    for shared in (True, False):
        (with_keys, said), (_, by_others) = pool.run(sent_with, keys, shared)
        without = pool.run(sent_with, {}, shared)[0][0]
        assert all(torch.equal(without[name], value) for name, value in with_keys.items()) is shared
        assert [line.split()[0] for line in said] == list(keys) * shared and by_others == []
