"""What ranks add up depends on their gradients alone: not on earlier backwards, nor on how units are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters
from models import seeded
from ranks import RankPool
from ranks_runs import CLIPPING, HYPER, Place, Run, engine_config, quiet
from reference import Hyper, Reference, differences
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.broad

Pool = Callable[[int], RankPool]
WIDTH, STEPS, RESUMED = 48, 5, (1, 2, 4)
PLACES = (Place(0), Place(1, "none", "cpu"), Place(2, "none", "cpu"), Place(3, "cpu", "cpu"),
          Place(3, "nvme", "nvme", shared=False))  # fmt: skip


class Heads(nn.Module):
    """A trunk whose layers are used twice, one of them recomputed by backwards of its own; one head a call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        for _ in range(2):
            x = x + checkpoint(self.down, torch.relu(self.up(x)), use_reentrant=True)
            x = self.norm(x)
        return self.heads[head](x).float().square().mean()


def trained(place: Place, nvme_path: str, accumulation: int, threshold: int) -> dict[int, dict[str, torch.Tensor]]:
    """Masters of a run (0), of one that saves (STEPS), and of one resumed after each of its steps RESUMED."""
    import zero

    quiet()
    config = engine_config(Run(bf16=True, accumulation=accumulation), place, nvme_path)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold

    def run(first: int, last: int, folder: str | None = None) -> dict[str, torch.Tensor]:
        """Goes on from what `folder` has of step `first`; from none, it leaves that of each step of RESUMED there."""
        with seeded(3):
            model = Heads()
        with zero.initialize(model=model, config=config)[0] as engine:
            if first:
                engine.load_checkpoint(folder, tag=f"step {first}")
            for index in range(first * accumulation, last * accumulation):
                generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
                x = torch.randn(4, WIDTH, generator=generator).bfloat16().requires_grad_()
                engine.backward(engine(x, (index + index // 4) % 3))
                engine.step()
                done, micro_steps = divmod(index + 1, accumulation)
                if folder is not None and not first and not micro_steps and done in RESUMED:
                    engine.save_checkpoint(folder, tag=f"step {done}")
            return masters(engine)

    told = {0: run(0, STEPS)}
    if not threshold:
        told[STEPS] = run(0, STEPS, f"{nvme_path}/saved")
        told |= {step: run(step, STEPS, f"{nvme_path}/saved") for step in RESUMED}
    return told


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_run_goes_on_as_it_would_have_without_a_stop_and_whatever_is_persistent(
    rank_pool: Pool, nvme_path: Any, place: Place, accumulation: int
) -> None:
    pool = rank_pool(3 if (place.stage, accumulation) in ((2, 2), (3, 1)) and place.states != "nvme" else 2)
    told = pool.run(trained, place, str(nvme_path), accumulation, 0)[0]
    for step in (*RESUMED, STEPS):
        assert differences(told[step], told[0]) == [], f"resumed after step {step}"
    for threshold in (100, 100_000) if place.stage == 3 else ():
        other = pool.run(trained, place, str(nvme_path), accumulation, threshold)[0]
        assert differences(other[0], told[0]) == [], f"threshold {threshold}"


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()


def norms(place: Place, nvme_path: str, threshold: int) -> list[float]:
    """Of clipped steps in which all ranks have the same batch, so that their mean is the gradient of one."""
    import zero

    quiet()
    config = engine_config(Run(bf16=True, clipping=CLIPPING), place, nvme_path)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    with seeded(3):
        model = Heads()
    found = []
    with zero.initialize(model=model, config=config)[0] as engine:
        for step in range(STEPS):
            engine.backward(engine(batch_of(step), step % 3))
            engine.step()
            found.append(engine.get_global_grad_norm())
    return found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_norm_is_that_of_the_gradient_however_units_and_ranks_cut_it(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    with seeded(3):
        alone = Reference(Heads(), lambda name: Hyper(**HYPER), clipping=CLIPPING)
    for step in range(STEPS):
        alone.backward(alone(batch_of(step), step % 3))
        alone.step()
    for threshold in (0, 100, 100_000) if place.stage == 3 else (0,):
        for told in rank_pool(2).run(norms, place, str(nvme_path), threshold):
            assert told == alone.norms, f"threshold {threshold}"
