"""Interrupts at random instants: after `zero_grad()` training goes on to the bits of a run without them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from probe import used_bytes

Open = Callable[..., Any]
KINDS: dict[str, tuple[tuple[str, str], dict[str, Any], dict[str, Any]]] = {
    "memory": (("cpu", "cpu"), {}, {}),
    "nvme": (("nvme", "nvme"), {"stage3_max_reuse_distance": 20_000}, {}),
    "activations": (("none", "nvme"), {}, {"activation_checkpointing": {"cpu_checkpointing": True}}),
}
TRIALS = 12
"""Of one engine, as long as an interrupt comes in each."""


class Interrupted(KeyboardInterrupt):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Interrupts the main thread once, after so many seconds; 0: not any more."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left)


def step(engine: Any, index: int) -> None:
    for part in range(2):
        engine.backward(engine(tokens(2 * index + part)))
        engine.step()


def interrupted(engine: Any, index: int, seconds: float, alarm: Callable[[float], None]) -> bool:
    """A step, interrupted after so long; True if it was."""
    try:
        alarm(seconds)
        step(engine, index)
        alarm(0)
    except Interrupted:
        return True
    return False


def go_on(engine: Any, index: int, taken: int) -> None:
    """What a user does after Ctrl-C: forget the gradients, and take the step that was not taken."""
    engine.zero_grad()
    engine.micro_steps += engine.micro_steps % 2
    if engine.global_steps == taken:
        step(engine, index)
        engine.micro_steps += engine.micro_steps % 2


def campaign(open_engine: Open, nvme_path: Path, kind: str, seed: int, alarm: Callable[[float], None]) -> int:
    """Interrupts of one engine, next to one that nobody interrupts; how many came."""
    pair, keys, more = KINDS[kind]
    config = make_config(pair, nvme_path, accumulation=2, clipping=0.5, zero={"sub_group_size": 8192, **keys}, **more)
    engine, quiet = open_engine(build("gpt"), config), open_engine(build("gpt"), config)
    generator, count = random.Random(seed), 0
    for index in range(2):
        began = time.monotonic()
        step(engine, index)
        usual = time.monotonic() - began
        step(quiet, index)
    for index in range(2, 2 + TRIALS):
        taken = engine.global_steps
        count += interrupted(engine, index, generator.random() * 1.2 * usual + 1e-5, alarm)
        go_on(engine, index, taken)
        step(quiet, index)
        different = [
            name
            for name, _ in quiet.module.named_parameters()
            if not torch.equal(engine.full_master(name), quiet.full_master(name))
        ]
        assert different == [], f"{kind}, seed {seed}, trial {index - 1}"
    assert leased_bytes(engine) == leased_bytes(quiet), f"{kind}, seed {seed}"
    engine.close()
    quiet.close()
    return count


def leased_bytes(engine: Any) -> dict[str, int]:
    """What is leased of each pool when nothing runs."""
    engine.zero_grad()
    engine.synchronize()
    engine.empty_partition_cache()
    return {pool: used_bytes(engine, pool) for pool in ("host_pool", "unit_pool", "gradient_pool")}


@pytest.mark.broad
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_interrupts(
    open_engine: Open, nvme_path: Path, kind: str, alarm: Callable[[float], None]
) -> None:
    count = seed = 0
    while not count:  # on a slow day none comes in time
        count, seed = campaign(open_engine, nvme_path, kind, seed, alarm), seed + 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_five_hundred_interrupts(
    open_engine: Open, nvme_path: Path, kind: str, alarm: Callable[[float], None]
) -> None:
    count = seed = 0
    while count < 500:
        seed += 1
        count += campaign(open_engine, nvme_path, kind, seed, alarm)
