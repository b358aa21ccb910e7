"""Whatever a disk does, slowly or not at all for a while, the run is the run on a good one, and it gets on.

Tight limits, little memory and random delays and failures: every interleaving of updates, fetches and gradients has to
end, and to end with the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import reference_of, unequal
from models import build, make_config, tokens
from probe import used_bytes
from recovery import NVME, Open, least_host_bytes, once_more

import offload.io.io_loop
import zero
from offload.errors import StorageError
from offload.io.aio import AioFault

STEPS = 6
ATTEMPTS = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock is an error within half a minute."""
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 25.0)


def weather(dice: random.Random, *, failures: bool) -> AioFault | None:
    if dice.random() < 0.2:
        return None
    return AioFault(
        fail_rate=dice.choice((0.02, 0.1, 1.0)) if failures else 0.0,
        short_rate=dice.choice((0.0, 0.1)),
        delay_rate=dice.choice((0.1, 0.5, 1.0)),
        delay_seconds=dice.choice((0.0005, 0.002, 0.008)),
        ops=dice.choice((("read", "write"), ("read",), ("write",))),
        skip=dice.choice((0, 5, 20)),
        count_max=dice.choice((1, 3, 10)) if failures else 0,
        seed=dice.randrange(1 << 30),
    )


def keys_of(dice: random.Random) -> dict[str, Any]:
    return {
        "sub_group_size": dice.choice((4096, 8192, 10**9)),
        "stage3_max_live_parameters": dice.choice((20_000, 40_000, 60_000)),
        "stage3_prefetch_bucket_size": dice.choice((0, 15_000, 10**6)),
        "stage3_max_reuse_distance": dice.choice((0, 20_000, 10**6)),
        "stage3_param_persistence_threshold": dice.choice((0, 64)),
        "offload_optimizer": {"buffer_count": dice.choice((2, 3, 4))},
    }


def edit(engine: Any, reference: Any, value: float) -> None:
    edited = torch.full_like(reference.full_parameter("blocks.1.up.bias"), value)
    parameter = engine.module.blocks[1].up.bias
    try:
        with zero.GatheredParameters([parameter]), torch.no_grad():
            parameter.copy_(edited)
    except StorageError:
        # Either nothing was opened, or the edit is kept: the second time it is no news.
        once_more(lambda: edit(engine, reference, value), ATTEMPTS)
        return
    reference.edit("blocks.1.up.bias", edited)


def evaluate(engine: Any, reference: Any) -> None:
    with torch.no_grad():
        assert torch.equal(engine(tokens(70), 1), reference(tokens(70), 1))


BETWEEN: tuple[Callable[[Any, Any], Any], ...] = (
    lambda engine, reference: None,
    lambda engine, reference: engine.synchronize(),
    lambda engine, reference: engine.zero_grad(),
    lambda engine, reference: engine.full_state("blocks.2.up.weight"),
    evaluate,
    lambda engine, reference: edit(engine, reference, 0.25),
)


def one_step(engine: Any, index: int, depth: int | None) -> None:
    """A step of a user who repeats what raised: forward and step as they are, a backward with its forward."""
    for _ in range(ATTEMPTS):
        try:
            loss = engine(tokens(index), depth)
        except StorageError:
            continue
        try:
            engine.backward(loss)
        except StorageError:
            once_more(engine.zero_grad, ATTEMPTS)
            continue
        break
    else:
        raise AssertionError("the disk is well most of the time, and still no backward succeeds")
    before = engine.global_steps
    once_more(engine.step, ATTEMPTS)
    assert engine.global_steps == before + 1


def run(open_engine: Open, nvme_path: Path, seed: int, *, failures: bool) -> None:
    dice = random.Random(seed)
    config = make_config(NVME, nvme_path, clipping=dice.choice((0.0, 0.5)), zero=keys_of(dice))
    if dice.random() < 0.5:
        config["memory_budget"] = {"host": least_host_bytes(config, "early_exit")}
    engine = open_engine(build("early_exit"), config)
    reference = reference_of("early_exit", clipping=config["gradient_clipping"])
    for index in range(STEPS):
        depth = dice.choice((None, None, 1, 2))
        engine.inject(weather(dice, failures=failures))
        one_step(engine, index, depth)
        reference.backward(reference(tokens(index), depth))
        reference.step()
        between = dice.choice(BETWEEN)
        once_more(lambda: between(engine, reference), ATTEMPTS)  # noqa: B023
    engine.inject(None)
    once_more(engine.synchronize)
    assert engine.global_steps == STEPS
    assert used_bytes(engine, "host_pool") == 0
    assert unequal(engine, reference, "early_exit") == []
    engine.close()


@pytest.mark.broad
@pytest.mark.parametrize("seed", range(12))
def test_a_slow_disk_changes_nothing_and_stops_nothing(open_engine: Open, nvme_path: Path, seed: int) -> None:
    run(open_engine, nvme_path, seed, failures=False)


@pytest.mark.parametrize("seed", range(100, 116))
def test_a_disk_that_is_slow_and_fails_now_and_then_loses_nothing(
    open_engine: Open, nvme_path: Path, seed: int
) -> None:
    run(open_engine, nvme_path, seed, failures=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_such_disks(open_engine: Open, nvme_path: Path, seed: int) -> None:
    run(open_engine, nvme_path, seed, failures=seed % 3 > 0)
