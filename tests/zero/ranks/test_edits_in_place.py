"""What a rank does to weights that it sees at any time, or that all ranks see."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded
from ranks import RankPool
from ranks_runs import Place, Run, engine_config, opened, quiet
from torch import nn

from offload.errors import StateError

Pool = Callable[[int], RankPool]


class Scaled(nn.Module):
    """Two layers; the weight of the first may be scaled whenever the model is called: "in place" or through ".data"."""

    def __init__(self, shrinks: str = "") -> None:
        super().__init__()
        self.first, self.second, self.shrinks = nn.Linear(37, 41), nn.Linear(41, 3), shrinks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.shrinks == "in place":
                self.first.weight.mul_(0.5)
            elif self.shrinks == ".data":
                self.first.weight.data.mul_(0.5)
        return self.second(torch.relu(self.first(x))).square().mean()


def edit_between_steps(place: Place, nvme_path: str) -> list[torch.Tensor]:
    """A weight before an edit that every rank makes, after it, and after another step: two ranks, equal data."""
    with seeded(3):
        model, x = Scaled(), torch.randn(5, 37)
    told = []
    with opened(place, nvme_path, model) as engine:
        for turn in range(2):
            engine.backward(engine(x))
            engine.step()
            told.append(engine.full_master("first.weight"))
            if turn == 0:
                model.first.weight.data.mul_(0.5)
                told.append(engine.full_master("first.weight"))
    return told


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize(("stage", "states"), [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme")])
def test_an_edit_that_every_rank_makes_to_its_weights_happens_once(
    rank_pool: Pool, nvme_path: Any, stage: int, states: str, shared: bool
) -> None:
    several = rank_pool(2).run(edit_between_steps, Place(stage, "none", states, shared=shared), str(nvme_path))
    alone = edit_between_steps(Place(stage, "none", states), str(nvme_path))
    for told in several:
        for ours, theirs in zip(told, alone, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(told[1], told[0] * 0.5)


def edit_by_one_and_resume(place: Place, nvme_path: str) -> list[torch.Tensor]:
    """A weight that the second rank has edited, and what a fresh engine has of it."""
    import zero

    told = []
    for seed in (3, 4):
        with seeded(seed):
            model = Scaled()
        with opened(place, nvme_path, model) as engine:
            if not told:
                with zero.GatheredParameters([model.first.weight], modifier_rank=1), torch.no_grad():
                    if dist.get_rank() == 1:
                        model.first.weight.mul_(0.5)
                engine.save_checkpoint(f"{nvme_path}/saved")
            else:
                engine.load_checkpoint(f"{nvme_path}/saved")
            told.append(engine.full_master("first.weight"))
    return told


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize(("stage", "states"), [(0, "none"), (1, "cpu"), (2, "nvme"), (3, "cpu")])
def test_what_one_rank_has_edited_is_saved_by_all(
    rank_pool: Pool, nvme_path: Any, stage: int, states: str, shared: bool
) -> None:
    place = Place(stage, "none", states, shared=shared, more=(("stage3_param_persistence_threshold", 10_000),))
    with seeded(3):
        first = Scaled().first.weight.detach()
    for told in rank_pool(2).run(edit_by_one_and_resume, place, str(nvme_path)):
        assert torch.equal(told[0], first * 0.5)
        assert torch.equal(told[1], told[0])


def shrink_in_forward(how: str, place: Place, nvme_path: str) -> str:
    with seeded(3):
        model, x = Scaled(shrinks=how), torch.randn(5, 37)
    with opened(place, nvme_path, model) as engine:
        try:
            engine(x)
        except StateError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("how", ["in place", ".data"])
@pytest.mark.parametrize("where", ["none", "nvme"])
def test_forward_may_not_modify_what_other_ranks_read_at_any_time(
    rank_pool: Pool, nvme_path: Any, where: str, how: str
) -> None:
    for told in rank_pool(2).run(shrink_in_forward, how, Place(3, where, where), str(nvme_path)):
        assert "in place" in told
        assert "shared_host_memory" in told


def shrink_and_read(how: str, place: Place, nvme_path: str) -> torch.Tensor:
    with seeded(3):
        model, x = Scaled(shrinks=how), torch.randn(5, 37)
    with opened(place, nvme_path, model) as engine:
        engine(x)
        return engine.full_parameter("first.weight")  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["in place", ".data"])
@pytest.mark.parametrize("where", ["none", "nvme"])
def test_what_forward_writes_is_kept_where_ranks_share_no_memory(
    rank_pool: Pool, nvme_path: Any, where: str, how: str
) -> None:
    place = Place(3, where, where, shared=False)
    with seeded(3):
        first = Scaled().first.weight.detach()
    for told in rank_pool(2).run(shrink_and_read, how, place, str(nvme_path)):
        assert torch.equal(told, first * 0.5)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def double(kind: str, weight: nn.Parameter) -> None:
    import zero
    from zero import utils

    if kind == "gathered":
        with zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(2)
    elif kind == "full":
        utils.safe_set_full_fp32_param(weight, 2 * utils.safe_get_full_fp32_param(weight))
    else:
        utils.safe_set_local_fp32_param(weight, 2 * utils.safe_get_local_fp32_param(weight))


def edit_while_updates_are_due(place: Place, nvme_path: str, kind: str, slow: int) -> list[tuple[float, float]]:
    """Losses right after a step and an edit of one weight, and those of the weights that all ranks then have."""
    import zero

    with seeded(3):
        model, x = Stack(), torch.randn(5, 32)
    told = []
    quiet()
    config = engine_config(Run(bf16=True), place, nvme_path)
    with zero.initialize(model=model, config=config)[0] as engine, torch.no_grad():
        for index in range(4):
            with torch.enable_grad():
                engine.backward(engine(x.bfloat16()))
            engine.step()
            double(kind, model.layers[index].weight)
            if dist.get_rank() == slow:
                time.sleep(0.3)  # its updates wait for the forward that needs them
            loss = engine(x.bfloat16()).item()
            with zero.GatheredParameters(model.parameters()):
                plain = Stack().bfloat16()
                plain.load_state_dict(model.state_dict())
            told.append((loss, plain(x.bfloat16()).item()))
    return told


@pytest.mark.broad
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("kind", ["gathered", "full", "local"])
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_after_an_edit_a_rank_reads_what_the_others_have_updated(
    rank_pool: Pool, nvme_path: Any, where: str, kind: str, slow: int
) -> None:
    # Each weight is updated on its own, when it is fetched and not ahead.
    place = Place(3, where, where, more=(("sub_group_size", 512), ("stage3_prefetch_bucket_size", 0)))
    for told in rank_pool(2).run(edit_while_updates_are_due, place, str(nvme_path), kind, slow):
        assert [loss for loss, _ in told] == [plain for _, plain in told]
