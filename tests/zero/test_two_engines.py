"""Several engines live in one process and know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import train
from models import build, make_config, tokens, trainability
from reference import differences, snapshot

Open = Callable[..., Any]


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
