"""A model that several ranks build under `zero.Init` is there once, wherever its parameters will live."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from models import seeded
from ranks import RankPool
from ranks_runs import Place, Run, engine_config, quiet
from torch import nn

Pool = Callable[[int], RankPool]
PLACES = (Place(3, "none", "none"), Place(3, "cpu", "cpu"), Place(3, "nvme", "nvme"))
everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
WIDTH, LAYERS = 1024, 16
SOME = [f"layers.{index}.{kind}" for index in (0, 1, LAYERS - 1) for kind in ("weight", "bias")]
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


def nameless() -> dict[tuple[int, int], int]:
    """(device, inode) -> bytes held, of the files without a name that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the listing's own
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            found[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return found


def configured(place: Place, nvme_path: str) -> dict[str, Any]:
    quiet()
    return engine_config(Run(bf16=True), place, nvme_path)


class Tall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(2)  # a parent's constructor edits what its children's have made
            self.layers[0].bias.copy_(self.layers[1].bias + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


def held_while_built(place: Place, nvme_path: str) -> tuple[dict[tuple[int, int], int], int, bool, int]:
    import zero

    config = configured(place, nvme_path)
    before, process = nameless(), psutil.Process()
    resident_bytes = process.memory_info().rss - process.memory_info().shared
    with seeded(7 + dist.get_rank()), zero.Init(config_dict_or_path=config):
        model = Tall()
    grown = process.memory_info().rss - process.memory_info().shared - resident_bytes
    held = {key: nbytes for key, nbytes in nameless().items() if key not in before}
    dist.barrier()
    with zero.initialize(model=model, config=config)[0] as engine:
        first = {name: engine.full_master(name) for name in SOME}
        left = sum(nbytes for key, nbytes in nameless().items() if key in held)
    with seeded(7):
        theirs = Tall()
    same = all(torch.equal(value, theirs.get_parameter(name)) for name, value in first.items())
    return held, grown, same, left


@pytest.mark.broad
@everywhere
def test_ranks_of_a_node_hold_the_model_once(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    told = rank_pool(2).run(held_while_built, place, str(nvme_path))
    assert all(same for _, _, same, _ in told)
    files = {key: nbytes for held, _, _, _ in told for key, nbytes in held.items()}
    assert MODEL_BYTES <= sum(files.values()) <= 1.05 * MODEL_BYTES
    assert all(grown < MODEL_BYTES / 2 for _, grown, _, _ in told)
    assert [left for _, _, _, left in told] == [0, 0]


def written_after_init(place: Place, nvme_path: str) -> bool:
    import zero

    def rewritten(model: nn.Linear) -> nn.Linear:
        with seeded(3):
            model.weight.data.normal_()
            model.bias.data[1:].fill_(0.5)
        return model

    config = configured(place, nvme_path)
    with seeded(7), zero.Init(config_dict_or_path=config):
        model = nn.Linear(64, 64)
    rewritten(model)
    with zero.initialize(model=model, config=config)[0] as engine, seeded(7):
        theirs = rewritten(nn.Linear(64, 64))
        return all(torch.equal(engine.full_master(name), value) for name, value in theirs.named_parameters())


@everywhere
def test_a_write_between_init_and_initialize_lands_on_every_rank(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    assert rank_pool(2).run(written_after_init, place, str(nvme_path)) == [True, True]


def built_apart(place: Place, nvme_path: str) -> None:
    import zero

    config = configured(place, nvme_path)
    with zero.Init(config_dict_or_path=config):
        nn.Linear(4, 4 + dist.get_rank())
        model = nn.Linear(4, 4)
    zero.initialize(model=model, config=config)


@everywhere
def test_ranks_that_build_different_models_are_told(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    for told in rank_pool(2).run(built_apart, place, str(nvme_path), errors="return"):
        assert "rank 1 has built other parameters than rank 0" in str(told)


def spilled(place: Place, nvme_path: str) -> int:
    import zero

    before = nameless()
    with zero.Init(config_dict_or_path=configured(place, nvme_path)):
        model = Tall()
    held = sum(nbytes for key, nbytes in nameless().items() if key not in before)
    del model
    return held


@pytest.mark.parametrize(
    "place", [Place(2, "none", "cpu"), Place(3, "cpu", "cpu", shared=False)], ids=lambda place: place.name
)
def test_a_model_that_no_rank_may_share_stays_in_memory(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    assert rank_pool(2).run(spilled, place, str(nvme_path)) == [0, 0]
