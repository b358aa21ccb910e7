"""Frozen weights as codes on two ranks: each keeps a part of the codes, and both train what one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import seeded
from ranks import RankPool
from torch import Tensor, nn

import zero


class Adapted(nn.Module):
    """A frozen layer between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.base, self.after = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 8)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.base(self.before(x)))).square().mean()


def losses(tier: str, path: str, shares: bool) -> list[float]:
    where = {"device": tier} | ({"nvme_path": path} if tier == "nvme" else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": where,
            "offload_optimizer": dict(where),
            "stage3_param_persistence_threshold": 0,
            "shared_host_memory": shares,
        },
        "weight_quantization": {"post_init_quant": {"base": {"num_bits": 4, "group_size": 32}}},
    }
    with seeded(0):
        model, x = Adapted(), torch.randn(4, 64)
    with zero.initialize(model=model, config=config)[0] as engine:
        found = []
        for _ in range(4):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        assert sum("packed" in name for name, _ in engine.named_full_parameters()) == 1
        return found


@pytest.mark.parametrize(("tier", "shares"), [("nvme", False), ("cpu", True)])
def test_two_ranks_with_parts_of_the_codes_train_as_one(
    rank_pool: Callable[[int], RankPool], tier: str, shares: bool, nvme_path: Any
) -> None:
    wanted = losses(tier, str(nvme_path), False)
    for found in rank_pool(2).run(losses, tier, str(nvme_path), shares):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < wanted[0]
