"""Two ranks that see the same samples train to the bits of one that runs torch's optimizer alone, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_roots import has_kernel
from models import make_config
from muon_plain import BLOCK, MuonAndAdam
from pairwise import in_pairs
from ranks import RankPool
from ranks_runs import quiet
from tiled_optimizers import Group, Plain, differences, held_by, in_groups, patchy, train

from offload.errors import ConfigError
from zero.ops.lion import FusedLion

pytestmark = pytest.mark.broad

Pool = Callable[[int], RankPool]

STEPS = 4
NAMED: dict[str, tuple[Any, Group, Group]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.2}, {"momentum": 0.5, "nesterov": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.3}, {"lr": 0.01}),
    "Lion": (FusedLion, {"lr": 0.002, "weight_decay": 0.1}, {"lr": 0.001}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.003, "weight_decay": 0.01}, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.01}, {"lr": 0.01}),
    "Muon": (lambda groups, **options: MuonAndAdam(groups), BLOCK["params"], {}),  # type: ignore[dict-item]
}
PLACES = (
    (0, "none", "none"), (1, "none", "cpu"), (1, "none", "nvme"), (2, "none", "cpu"), (3, "none", "none"),
    (3, "cpu", "cpu"), (3, "nvme", "nvme"),
)  # fmt: skip


def compare(name: str, place: tuple[int, str, str], nvme_path: str, folder: str, shared: bool) -> list[str]:
    """What differs on this rank: after some steps, and after going on from a checkpoint."""
    import zero

    quiet()
    kind, options, second = NAMED[name]
    stage, *pair = place
    keys = {"stage": stage, "shared_host_memory": shared, "sub_group_size": 8192}
    block = {"type": name, "params": options}

    def opened() -> tuple[Any, torch.nn.Module]:
        model = patchy()
        config = make_config((pair[0], pair[1]), nvme_path, optimizer=block, bf16=False, zero=keys)
        groups = in_groups(list(model.named_parameters()), second)
        return zero.initialize(model=model, config=config, model_parameters=groups)[0], model

    plain = Plain(lambda groups: kind(groups, **options), second, bf16=False, clipping=0.0)
    train(plain, 0, STEPS, bf16=False)
    engine, model = opened()
    with engine:
        train(engine, 0, STEPS // 2, bf16=False)
        engine.save_checkpoint(folder)
        train(engine, STEPS // 2, STEPS, bf16=False)
        told = differences(held_by(engine, model), plain.held())
    resumed, model = opened()
    with resumed:
        resumed.load_checkpoint(folder)
        train(resumed, STEPS // 2, STEPS, bf16=False)
        return told + differences(held_by(resumed, model), plain.held())


@in_pairs(name=tuple(NAMED), place=PLACES, shared=(True, False))
def test_two_ranks_give_the_bits_of_torch_alone(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, name: str, place: tuple[int, str, str], shared: bool
) -> None:
    has_kernel(name)  # skips here, not in a rank
    told = rank_pool(2).run(compare, name, place, str(nvme_path), str(tmp_path), shared)
    assert told == [[], []]


def refused(nvme_path: str) -> str:
    """What a rank is told that asks for Shampoo."""
    import zero

    quiet()
    model = patchy()
    config = make_config(("cpu", "cpu"), nvme_path, optimizer={"type": "Shampoo"})
    with pytest.raises(ConfigError) as caught:
        zero.initialize(model=model, config=config)
    return str(caught.value)


def test_what_is_refused_is_refused_on_every_rank(rank_pool: Pool, nvme_path: Path) -> None:
    told = rank_pool(2).run(refused, str(nvme_path))
    assert all("optimizer.type" in each and "torch has no such class" in each for each in told)
