"""Without shared memory ranks gather units together: what they gather next must not depend on chance."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import make_config, seeded
from ranks import RankPool
from ranks_runs import quiet
from torch import Tensor, nn

Pool = Callable[[int], RankPool]

WIDTH, HIDDEN = 16, 512
UNIT_NUMEL = WIDTH * HIDDEN
HALF_SECOND = 0.5


class Branches(nn.Module):
    """Four blocks of one size; the caller says which run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)) for _ in range(4)
        )

    def forward(self, x: Tensor, path: str) -> Tensor:
        for letter in path:
            x = x + self.blocks["abcd".index(letter)](x)
        return x.square().mean()


def evaluate_elsewhere(nvme_path: str, late_rank: int) -> list[float]:
    """What a step makes come in is not what the evaluation after it was expected to use, and that was wrong too."""
    from offload.aio import AioFault

    import zero

    quiet()
    with seeded(1):
        model = Branches()
    limits = {"stage3_max_live_parameters": 4 * UNIT_NUMEL, "stage3_prefetch_bucket_size": 4 * UNIT_NUMEL}
    config = make_config(("nvme", "cpu"), nvme_path, bf16=False, zero={"shared_host_memory": False, **limits})
    losses = []
    with zero.initialize(model=model, config=config)[0] as engine:
        x = torch.ones(2, WIDTH)
        for path in ("cd", "cd", "ab", "cb", "ab"):
            engine.backward(engine(x, "ab"))
            engine.inject(AioFault(delay_rate=1.0, delay_seconds=HALF_SECOND / 2, ops=("read",)))
            engine.step()
            if dist.get_rank() == late_rank:  # what comes in has arrived when it goes on, and for the others it has not
                time.sleep(2 * HALF_SECOND)
            engine.eval()
            with torch.no_grad():
                losses.append(engine(x, path).item())
            engine.train()
            engine.inject(None)
    return losses


@pytest.mark.parametrize("late_rank", [0, 1])
def test_ranks_gather_the_same_units_whatever_has_arrived_when(
    rank_pool: Pool, nvme_path: Path, late_rank: int
) -> None:
    one, other = rank_pool(2).run(evaluate_elsewhere, str(nvme_path), late_rank, timeout_seconds=90)
    assert one == other
