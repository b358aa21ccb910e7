"""Checkpoints and data: a loop that was cut off goes on with the batch it would have had next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import ADAMW
from torch import nn

import zero

Open = Callable[..., Any]
RankPool = Callable[[int], Any]
EPOCHS = 3


class Noisy:
    """Vectors that tell their index, with noise that is drawn when they are fetched."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) * 0.5


class OwnState:
    """Somebody's loader, whose state is no plain type."""

    def __init__(self) -> None:
        self.at = Place(0)

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Place:
    def __init__(self, number: int) -> None:
        self.number = number


def config(stage: int = 0, micro: int = 2, accumulation: int = 1, world_size: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * world_size,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def train(engine: Any, begin: int = 0, stop: int | None = None, save: Path | None = None) -> list[Any]:
    """What each batch was and what came of it, until so many batches were had; then the engine is saved."""
    got: list[Any] = []
    for epoch in range(begin, EPOCHS):
        for batch in engine.training_dataloader:
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            got.append((epoch, batch.tolist(), loss.item()))
            if len(got) == stop:
                engine.save_checkpoint(save, client_state={"epoch": epoch})
                return got
    return got


@given(st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_loop_that_is_cut_off_goes_on_bit_for_bit(
    open_engine: Open, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    samples, micro = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    keys = config(micro=micro, accumulation=data.draw(st.integers(1, 2)))

    def opened(seed: int) -> Any:
        engine = open_engine(model(), keys, training_data=Noisy(samples))
        torch.manual_seed(seed)
        return engine

    whole = opened(1)
    expected = train(whole)
    folder = tmp_path_factory.mktemp("saved")
    stop = data.draw(st.integers(1, len(expected)))
    before = train(opened(1), stop=stop, save=folder)
    engine = opened(2)
    _, client = engine.load_checkpoint(folder)
    after = train(engine, client["epoch"])
    assert before + after == expected
    assert engine.data_position["batches"] == sum(epoch == client["epoch"] for epoch, *_ in before)
    for ours, theirs in zip(engine.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach())


def test_weights_alone_leave_the_data_where_it_is(open_engine: Open, tmp_path: Path) -> None:
    first = open_engine(model(), config(), training_data=Noisy(6))
    train(first, stop=2, save=tmp_path)
    engine = open_engine(model(), config(), training_data=Noisy(6))
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.training_dataloader.state_dict()["batches"] == 0 and engine.data_position is None


def test_an_engine_without_a_loader_says_so_and_keeps_the_position(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(open_engine(model(), config(), training_data=Noisy(9)), stop=3, save=tmp_path)
    engine = open_engine(model(), config())
    with caplog.at_level(logging.WARNING, "zero"):
        engine.load_checkpoint(tmp_path)
    assert (
        "but the engine has no loader, so the position is not restored" in caplog.text
        and "engine.data_position" in caplog.text
    )
    loader = engine.deepspeed_io(Noisy(9))
    loader.load_state_dict(engine.data_position)
    assert len(list(loader)) == 2


def test_a_checkpoint_without_a_position_says_so(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine(model(), config()).save_checkpoint(tmp_path)
    engine = open_engine(model(), config(), training_data=Noisy(9))
    with caplog.at_level(logging.WARNING, "zero"):
        engine.load_checkpoint(tmp_path)
    assert "has no position in the data, so the position of the data loader is not changed" in caplog.text
    assert len(list(engine.training_dataloader)) == 5


def test_a_checkpoint_without_a_schedule_says_that_the_new_one_begins(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine(model(), config()).save_checkpoint(tmp_path)
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    engine = open_engine(model(), {**config(), **schedule})
    with caplog.at_level(logging.WARNING, "zero"):
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        assert "scheduler" not in caplog.text
        engine.load_checkpoint(tmp_path)
    assert "no state of a learning-rate scheduler, so the WarmupLR goes on from where it is" in caplog.text


def test_a_loader_that_is_repeated_goes_on(open_engine: Open, tmp_path: Path) -> None:
    def opened() -> Any:
        engine = open_engine(model(), config(), training_data=list(range(5)))
        engine.training_dataloader = zero.RepeatingLoader(engine.training_dataloader)
        return engine

    engine = opened()
    batches = [next(engine.training_dataloader).tolist() for _ in range(4)]
    engine.save_checkpoint(tmp_path)
    expected = [next(engine.training_dataloader).tolist() for _ in range(6)]
    engine = opened()
    assert next(engine.training_dataloader).tolist() == batches[0]
    engine.load_checkpoint(tmp_path)
    assert [next(engine.training_dataloader).tolist() for _ in range(6)] == expected


def test_a_loader_of_somebody_else_gets_its_state_back_whatever_it_is(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(model(), config())
    engine.training_dataloader = OwnState()
    engine.training_dataloader.at = Place(7)
    engine.save_checkpoint(tmp_path)
    engine = open_engine(model(), config())
    engine.training_dataloader = OwnState()
    engine.load_checkpoint(tmp_path, allow_pickle=True)
    assert engine.training_dataloader.at.number == 7


# ---- several ranks -----------------------------------------------------------------------------


def indices_of(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch[:, 0]]


def part_of_an_epoch(folder: str, samples: int, batches: int) -> list[int]:
    """Load what is there, if anything is; train on so many batches, or all there are; save."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    engine = zero.initialize(
        model=model(), config=config(3, world_size=world_size, micro=1), training_data=Noisy(samples)
    )[0]
    with engine:
        if Path(folder, "latest").exists():
            engine.load_checkpoint(folder)
        had = []
        for batch in engine.training_dataloader:
            had.append(batch)
            engine.backward(engine(batch).square().mean())
            engine.step()
            if len(had) == batches:
                engine.save_checkpoint(folder)
                break
        return indices_of(had)


@pytest.mark.parametrize("sequence", [(1, 2, 3), (3, 1, 2)])
def test_ranks_that_come_and_go_have_each_sample_of_an_epoch_once(
    rank_pool: RankPool, tmp_path: Path, sequence: tuple[int, ...]
) -> None:
    had: list[int] = []
    for world_size, batches in zip(sequence, (6 // sequence[0], 6 // sequence[1], 99), strict=True):
        if world_size == 1:
            results = [part_of_an_epoch(str(tmp_path), 18, batches)]
        else:
            results = rank_pool(world_size).run(part_of_an_epoch, str(tmp_path), 18, batches)
        assert len({len(result) for result in results}) == 1
        had += [index for result in results for index in result]
    assert sorted(had) == list(range(18))
