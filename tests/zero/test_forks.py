"""An engine in a forked child says at once that it is the parent's, and the parent's goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from recovery import in_a_fork

Open = Callable[..., Any]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme")], ids="-".join)
def test_a_forked_child_is_told_and_the_parent_goes_on(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    outcomes = []
    for forks in (True, False):
        engine = open_engine(build("gpt"), make_config(pair, nvme_path))
        for index in range(3):
            engine.backward(engine(tokens(index)))
            engine.step()
            for action in actions_of(engine, nvme_path, forward=pair[0] == "nvme") if forks else ():
                told = in_a_fork(action)
                assert told.startswith("StateError") and "was forked from the one that has the engine" in told
        outcomes.append({name: engine.full_parameter(name) for name, _ in engine.module.named_parameters()})
        engine.close()
    first, second = outcomes
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (nvme_path / "saves" / "latest").exists()


def actions_of(engine: Any, path: Any, *, forward: bool) -> list[Callable[[], Any]]:
    """What waits for the engine's threads."""
    actions = [lambda: engine.full_state("head.weight"), lambda: engine.save_checkpoint(path / "saves")]
    return [*actions, lambda: engine(tokens(9))] if forward else actions
