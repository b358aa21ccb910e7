"""What is saved in the middle of a step is continued in full, or begun again, or refused: never a part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters, train, unequal
from models import GPT, WIDTH, build, make_config, seeded, tokens
from on_tiers import equal
from torch import nn

import zero
from offload.errors import ConfigError

Open = Callable[..., Any]
PAIR = ("cpu", "nvme")


def break_backward(engine: Any, index: int, *, bare: bool) -> None:
    """A backward that fails when the gradients of the last layers have arrived."""

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("broken off")

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = engine.module.blocks[0].register_forward_hook(hook)
    loss = engine(tokens(index))
    handle.remove()
    with pytest.raises(ArithmeticError):
        loss.backward() if bare else engine.backward(loss)


@pytest.mark.parametrize("bare", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_a_backward_that_was_broken_off_are_in_no_later_step(
    open_engine: Open, nvme_path: Path, tmp_path: Path, caplog: Any, accumulation: int, bare: bool
) -> None:
    config = make_config(PAIR, nvme_path, accumulation=accumulation, bf16=False)
    first, straight = (open_engine(build("gpt"), config) for _ in range(2))
    train(first, *range(2 * accumulation - 1))
    break_backward(first, 90, bare=bare)
    first.save_checkpoint(tmp_path)
    assert "the last backward was broken off" in caplog.text
    later = open_engine(build("gpt", seed=9), config)
    later.load_checkpoint(tmp_path)
    train(straight, *range(accumulation))
    for engine in (later, straight):
        train(engine, *range(20, 20 + accumulation))
    assert later.global_steps == straight.global_steps == 2
    assert unequal(later, straight) == []


def test_a_step_goes_on_only_with_the_number_that_its_gradients_were_divided_by(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def opened(accumulation: int) -> Any:
        return open_engine(build("gpt"), make_config(PAIR, nvme_path, accumulation=accumulation, bf16=False))

    first, other, again = opened(4), opened(8), opened(4)
    train(first, *range(2))
    first.save_checkpoint(tmp_path)
    before = masters(other)
    with pytest.raises(ConfigError, match="expected gradient_accumulation_steps 4, got 8"):
        other.load_checkpoint(tmp_path)
    assert equal(masters(other), before)
    again.load_checkpoint(tmp_path)
    for engine in (first, again):
        train(engine, 2, 3)
    assert first.global_steps == 1 and unequal(first, again) == []


class Rooted(GPT):
    """It has parameters of its own, and a child with the name that their unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Linear(WIDTH, WIDTH)

    def trunk(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.root(super().trunk(tokens))


def test_a_child_that_is_called_root_and_the_model_itself_both_keep_their_gradients(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def opened() -> Any:
        with seeded(0):
            model = Rooted()
        return open_engine(model, make_config(PAIR, nvme_path, accumulation=2, bf16=False))

    first, later = opened(), opened()
    train(first, 0)
    first.save_checkpoint(tmp_path)
    later.load_checkpoint(tmp_path)
    for engine in (first, later):
        train(engine, 1)
    assert first.global_steps == later.global_steps == 1
    assert equal(masters(first), masters(later))


def test_named_random_states_go_on_where_they_were(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    def draw() -> list[float]:
        with zero.checkpointing.get_cuda_rng_tracker().fork():
            drawn: list[float] = torch.rand(3).tolist()
            return drawn

    tracker = zero.checkpointing.get_cuda_rng_tracker()
    before = torch.get_rng_state()
    try:
        zero.checkpointing.model_parallel_cuda_manual_seed(7)
        engine = open_engine(build("gpt"), make_config(PAIR, nvme_path))
        first = draw()
        engine.save_checkpoint(tmp_path)
        second = draw()
        zero.checkpointing.model_parallel_cuda_manual_seed(7)
        assert draw() == first and draw() == second and draw() != second
        engine.load_checkpoint(tmp_path)
        assert draw() == second
    finally:
        tracker.reset()
        torch.set_rng_state(before)
