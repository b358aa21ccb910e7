"""Several engines live in one process and know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from models import build, make_config, seeded, tokens, trainability
from probe import storage_of
from reference import differences, snapshot
from torch import nn

from zero.plan import machine
from zero.plan.machine import machine_to_plan

Open = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("nvme", "cpu")])
def test_two_live_engines_train_as_each_would_alone(tiers: tuple[str, str], open_engine: Open, nvme_path: Path) -> None:
    def opened(index: int) -> Any:
        return open_engine(build("gpt", seed=index), make_config((tiers[index],) * 2, nvme_path, clipping=1.0))

    names = trainability(build("gpt"))
    alone = []
    for index in range(2):
        engine = opened(index)
        train(engine, 0, 1, 2)
        alone.append(snapshot(engine, names))
        engine.close()
    engines = [opened(0), opened(1)]
    for step in range(3):
        losses = [engine(tokens(step)) for engine in engines]  # both graphs are alive at once
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
    for engine, wanted in zip(engines, alone, strict=True):
        assert differences(snapshot(engine, names), wanted) == []
    engines[0].close()
    train(engines[1], 3)
    assert all(count >= 4 for count in engines[1].statistics().releases_by_unit.values())


@pytest.mark.parametrize("partly", [False, True])
def test_an_engine_that_another_model_takes_a_part_from_says_that_it_closes(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture, partly: bool
) -> None:
    """An actor and a critic over one trunk; whoever wraps the whole model again knows."""
    trunk, config = nn.Linear(8, 8), make_config(("cpu", "cpu"), nvme_path)
    actor = nn.Sequential(trunk, nn.Linear(8, 3))
    first = open_engine(actor, config)
    open_engine(nn.Sequential(trunk, nn.Linear(8, 1) if partly else actor), config)
    told = [text for text in caplog.messages if "share parameters need one engine" in text]
    assert len(told) == partly and all("0.weight and 1.weight" in text for text in told)
    assert first.run.closed


def test_memory_that_an_engine_has_still_to_touch_is_not_free_for_the_next_one(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of gradients come with the first step; what the kernel says is held still."""
    free, numel = 10**10, 1 << 22
    monkeypatch.setattr(machine, "available_memory", lambda: (free, "MemAvailable"))
    layer = nn.Linear(2048, 2048, bias=False)
    engine = open_engine(layer, make_config(("cpu", "cpu"), nvme_path))
    promised = free - machine_to_plan(CPU).available_bytes
    assert promised == pytest.approx(2 * numel, rel=0.05)
    assert machine_to_plan(CPU, storage_of(engine).memory_pools).available_bytes == free
    engine.backward(engine(torch.ones(1, 2048, dtype=torch.bfloat16)).float().sum())
    engine.step()
    engine.synchronize()
    assert free - machine_to_plan(CPU).available_bytes <= numel // 10
    other = open_engine(nn.Linear(2048, 2048, bias=False), make_config(("cpu", "cpu"), nvme_path))
    assert free - machine_to_plan(CPU).available_bytes == pytest.approx(promised, rel=0.05)
    other.close()
    assert free - machine_to_plan(CPU).available_bytes <= numel // 10


def linear(open_engine: Open, nvme_path: Path, seed: int, **more: Any) -> Any:
    with seeded(seed):
        layer = nn.Linear(8, 8)
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    return open_engine(layer, make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer=sgd, **more))


@pytest.mark.parametrize("way", ["engine", "scaled"])
@pytest.mark.parametrize("half", [False, True])
def test_one_loss_of_two_engines_is_divided_and_scaled_once(
    open_engine: Open, nvme_path: Path, way: str, half: bool
) -> None:
    """Scales are other ones: each engine's gradients are in its own."""
    x, dtype = torch.linspace(-1, 1, 16).view(2, 8), torch.float16 if half else torch.float32
    scales = [{"fp16": {"enabled": True, "loss_scale": scale}} if half else {} for scale in (256, 16)]
    one, other = (linear(open_engine, nvme_path, seed, accumulation=2, **scales[seed]) for seed in range(2))
    with seeded(0):
        plain_one = nn.Linear(8, 8)
    with seeded(1):
        plain_other = nn.Linear(8, 8)
    plain = torch.optim.SGD([*plain_one.parameters(), *plain_other.parameters()], lr=0.5)
    for index in range(2):
        given = (x * (index + 1)).to(dtype)
        loss = other(one(given)).float().square().mean()
        one.backward(loss) if way == "engine" else one.scale(loss).backward()
        one.step()
        other.step()
        (plain_other(plain_one(given.float())).square().mean() / 2).backward()
    plain.step()
    for engine, layer in ((one, plain_one), (other, plain_other)):
        assert engine.global_steps == 1
        for name, value in layer.named_parameters():
            torch.testing.assert_close(engine.full_master(name), value.detach(), rtol=0.02, atol=2e-3 if half else 1e-6)
