"""Hooks of optimizers are called with the engine's step, once each, however the step was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero.assembly.step_snapshots import StepSnapshots
from zero.values.fragments import safe_get_full_grad, safe_set_full_grad

Open = Callable[..., Any]
PAIRS = {"device": ("none", "none"), "nvme": ("nvme", "nvme")}


def hooked(optimizer: torch.optim.Optimizer, name: str, called: list[str]) -> None:
    def note(when: str) -> Callable[..., None]:
        def hook(of: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert of is optimizer
            called.append(f"{name} {when}")

        return hook

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))


@pytest.mark.parametrize("tier", PAIRS)
def test_each_hook_is_called_once_a_step_however_it_is_asked_for(open_engine: Open, nvme_path: Path, tier: str) -> None:
    model, called = build("gpt"), list[str]()
    handed = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hooked(handed, "handed", called)
    engine = open_engine(model, make_config(PAIRS[tier], nvme_path, optimizer={}, accumulation=2), optimizer=handed)
    hooked(engine.optimizer, "own", called)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("global before")),
        register_optimizer_step_post_hook(lambda *_: called.append("global after")),
    ]
    wanted = ["global before", "own before", "handed before", "own after", "handed after", "global after"]
    try:
        engine.backward(engine(tokens(0)))
        engine.step()
        assert called == []  # no boundary
        engine.backward(engine(tokens(1)))
        engine.step()
        assert called == wanted
        engine.backward(engine(tokens(2)))
        engine.optimizer.step()
        assert called == 2 * wanted
    finally:
        for handle in handles:
            handle.remove()
    assert engine.global_steps == 2


@pytest.mark.parametrize("tier", PAIRS)
def test_hooks_read_and_change_gradients_rates_and_states(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """What a hook changes before the step is what the step uses; what it reads after it is as of the step."""
    engines = [open_engine(build("gpt"), make_config(PAIRS[tier], nvme_path, bf16=False)) for _ in range(2)]
    ours, plain = engines
    read: list[torch.Tensor] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5
        for parameter in ours.module.parameters():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                safe_set_full_grad(parameter, 2 * gradient)

    ours.optimizer.register_step_pre_hook(before)
    ours.optimizer.register_step_post_hook(
        lambda optimizer, *_: read.append(optimizer.state[ours.module.head.weight]["exp_avg"])
    )
    plain.optimizer.param_groups[0]["lr"] = 0.5
    for index in range(2):
        ours.backward(ours(tokens(index)))
        ours.step()
        plain.backward(2 * plain(tokens(index)))
        plain.step()
        assert torch.equal(read[index], plain.full_state("head.weight")["exp_avg"])
    for name, _ in ours.module.named_parameters():
        assert torch.equal(ours.full_master(name), plain.full_master(name)), name


def test_after_a_step_that_is_skipped_no_hook_is_called(open_engine: Open, nvme_path: Path) -> None:
    engine, called = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path)), list[str]()
    hooked(engine.optimizer, "own", called)
    engine.backward(engine(tokens(0)) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and called == ["own before"]


def test_a_hook_that_raises_before_the_step_leaves_no_step(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path))

    def no(*_: Any) -> None:
        raise KeyError("no")

    handle = engine.optimizer.register_step_pre_hook(no)
    engine.backward(engine(tokens(0)))
    with pytest.raises(KeyError):
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    handle.remove()
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)


def test_hooks_after_a_step_are_called_also_where_somebody_told_of_it_raises(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, called = open_engine(build("gpt"), make_config(PAIRS["device"], nvme_path)), list[str]()
    hooked(engine.optimizer, "own", called)

    def fail(*_: object) -> None:
        raise OSError("told")

    monkeypatch.setattr(StepSnapshots, "commit_in_step", fail)
    engine.backward(engine(tokens(0)))
    with pytest.raises(OSError, match="told"):
        engine.step()
    assert called == ["own before", "own after"]
