"""QK-clip on two ranks with batches of their own: the larger logit of both counts, and both have the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from qk_model import MICRO_BATCHES, THRESHOLD, config_of, factors_of, llama, logits_of, loss_of
from ranks import RankPool
from ranks_runs import quiet

pytest.importorskip("transformers")
Pool = Callable[[int], RankPool]


def clipped(pair: tuple[str, str], folder: str, stage: int) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    import zero

    quiet()
    config = config_of(pair, folder, zero={"stage": stage})
    with zero.initialize(model=llama(), config=config)[0] as engine:
        engine.backward(loss_of(engine, MICRO_BATCHES[dist.get_rank()]))
        engine.step()
        return {name: engine.full_master(name) for name, _ in engine.module.named_parameters()}


@pytest.mark.parametrize(
    ("pair", "stage"), [(("none", "none"), 3), (("cpu", "cpu"), 3), (("nvme", "nvme"), 3), (("none", "cpu"), 1)]
)
def test_both_ranks_clip_by_the_larger_logit_of_both(
    rank_pool: Pool, tmp_path: Path, pair: tuple[str, str], stage: int
) -> None:
    one, other = rank_pool(2).run(clipped, pair, str(tmp_path), stage)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    largest = torch.maximum(*(logits_of(llama(), index)[0][0][:2] for index in MICRO_BATCHES))
    torch.testing.assert_close(factors_of(one), (THRESHOLD / largest).sqrt(), rtol=1e-5, atol=0)
