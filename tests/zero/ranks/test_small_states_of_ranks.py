"""Small states on several ranks: a parameter's owner has them, also after ranks came and went or the model changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config
from odd_states import BLOCK, RowMeans, plain_adafactor
from ranks import RankPool
from ranks_runs import quiet
from tiled_optimizers import Plain, differences, held_by, in_groups, patchy, train
from torch import nn

from offload.errors import StateError

Pool = Callable[[int], RankPool]
STEPS_EACH = 2
PLACES = (
    (0, "none", "none"), (1, "none", "nvme"), (2, "none", "cpu"), (3, "none", "none"), (3, "cpu", "nvme"),
    (3, "nvme", "nvme"),
)  # fmt: skip


def opened(place: tuple[int, str, str], folder: str, model: nn.Module, optimizer: Any = None, **more: Any) -> Any:
    import zero

    quiet()
    stage, *pair = place
    keys = {
        "stage": stage,
        "sub_group_size": 8192,
        "stage3_param_persistence_threshold": 200,
        "stage3_max_live_parameters": 60_000,
        **more,
    }
    block = BLOCK if optimizer is None else {}
    config = make_config((pair[0], pair[1]), f"{folder}/nvme", optimizer=block, bf16=True, zero=keys)
    return zero.initialize(model=model, config=config, optimizer=optimizer)[0]


def part(place: tuple[int, str, str], first: int, folder: str) -> Any:
    """Go on from what is saved, if anything is; what is held then."""
    model = patchy()
    with opened(place, folder, model) as engine:
        if first:
            engine.load_checkpoint(folder)
        train(engine, first, first + STEPS_EACH, bf16=True)
        engine.save_checkpoint(folder)
        return held_by(engine, model)


@pytest.mark.broad
@pytest.mark.parametrize(("counts", "stage"), [((1, 2, 4, 1), 3), pytest.param((4, 2, 3), 1, marks=pytest.mark.slow)])
def test_states_follow_their_parameters_between_ranks_that_come_and_go(
    rank_pool: Pool, tmp_path: Path, counts: tuple[int, ...], stage: int
) -> None:
    (tmp_path / "nvme").mkdir()
    pairs = [("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("none", "none")]
    plain = plain_adafactor()
    for number, (count, pair) in enumerate(zip(counts, pairs, strict=False)):
        first, place = number * STEPS_EACH, (stage, pair[0] if stage == 3 else "none", pair[1])
        train(plain, first, first + STEPS_EACH, bf16=True)
        for held in rank_pool(count).run(part, place, first, str(tmp_path)):
            assert differences(held, plain.held()) == [], f"{count} ranks"


def own_class(place: tuple[int, str, str], folder: str, shared: bool) -> tuple[list[str], int]:
    """What differs after some steps, and how many parameters' small states are on this rank."""
    model = patchy()
    made = RowMeans(in_groups(list(model.named_parameters()), {"lr": 0.02}))
    plain = Plain(RowMeans, {"lr": 0.02}, bf16=True, clipping=0.0)
    train(plain, 0, 4, bf16=True)
    with opened(place, folder, model, made, shared_host_memory=shared) as engine:
        train(engine, 0, 4, bf16=True)
        states = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(states)
        found = differences(held_by(engine, model), plain.held())
        return found, sum(bool(small.tensors) for small in engine.optimizer.small.values())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_two_ranks_have_a_part_each_and_give_the_bits_of_one(
    rank_pool: Pool, tmp_path: Path, place: tuple[int, str, str], shared: bool
) -> None:
    (tmp_path / "nvme").mkdir()
    told = rank_pool(2).run(own_class, place, str(tmp_path), shared)
    assert [differing for differing, _ in told] == [[], []]
    counts = [count for _, count in told]
    of_all = len(list(patchy().parameters())) - 2  # the idle layer's are never made
    assert counts == [of_all, of_all] if place[0] == 0 else (sum(counts) == of_all and min(counts) > 0)


def given_another_shape(place: tuple[int, str, str], folder: str) -> list[str]:
    """What each small state says to values of another shape."""
    from zero.utils import safe_set_full_optimizer_state

    model, told = patchy(), []
    with opened(place, folder, model) as engine:
        train(engine, 0, 1, bf16=True)
        for name, parameter in model.named_parameters():
            for key, state in engine.full_state(name).items():
                if isinstance(state, torch.Tensor) and state.ndim and state.shape != parameter.shape:
                    with pytest.raises(StateError) as refused:
                        safe_set_full_optimizer_state(parameter, torch.zeros(state.numel() + 1), key)
                    told.append(str(refused.value))
    return told


@pytest.mark.parametrize("place", [PLACES[1], PLACES[4]], ids=str)
def test_values_of_another_shape_are_refused_on_every_rank(
    rank_pool: Pool, tmp_path: Path, place: tuple[int, str, str]
) -> None:
    (tmp_path / "nvme").mkdir()
    one, other = rank_pool(2).run(given_another_shape, place, str(tmp_path))
    assert one == other and one and all("expected shape" in line for line in one)


def grown(place: tuple[int, str, str], folder: str) -> list[str]:
    """What differs between states before and after a layer joins whose parameters move others to other ranks."""
    model = patchy()
    with opened(place, folder, model) as engine:
        train(engine, 0, 4, bf16=True)
        names = [name for name, _ in model.named_parameters() if "idle" not in name]
        before = {name: engine.full_state(name) for name in names}
        held = {name for name in names if engine.optimizer.small[id(model.get_parameter(name))].tensors}
        torch.manual_seed(1)
        model.inside = nn.Sequential(model.inside, nn.Linear(150, 150))
        engine.replan()
        now = {name.replace("inside.", "inside.0."): name for name in names}
        new = {old for name, old in now.items() if id(model.get_parameter(name)) in engine.optimizer.small}
        after = {old: engine.full_state(name) for name, old in now.items()}
        told = [
            f"{name}/{key}" for name in names for key, value in before[name].items()
            if not torch.equal(torch.as_tensor(after[name].get(key, -1.0)), torch.as_tensor(value))
        ]  # fmt: skip
        train(engine, 4, 6, bf16=True)
        return told + ([] if held != new else ["nothing has moved to another rank"])


@pytest.mark.parametrize("place", [PLACES[1], PLACES[4]], ids=str)
def test_a_model_that_changes_takes_states_to_their_new_owners(
    rank_pool: Pool, tmp_path: Path, place: tuple[int, str, str]
) -> None:
    (tmp_path / "nvme").mkdir()
    assert rank_pool(2).run(grown, place, str(tmp_path)) == [[], []]
