"""The model and the run that made the checkpoint in tests/data. Do not change them, since it was made with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import freeze, make_config, seeded
from probe import units_read_once
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "data" / "checkpoint"
EXPECTED = FOLDER / "expected.safetensors"
TAG, STEPS, RANKS = "kept", 3, 2
CLIENT: dict[str, Any] = {"epoch": 1, "best": 0.5, "names": ["a", "b"], "range": (1, 2), "nothing": None}


class Kept(nn.Module):
    """A tied table, a frozen layer, parameters of 0 and 3 dimensions and of no elements, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(150, 30)
        self.frozen = nn.Linear(30, 30)
        self.norm = nn.BatchNorm1d(30)
        self.cube = nn.Parameter(torch.randn(2, 3, 5))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.head = nn.Linear(30, 150, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tensor([[True, False, True]]))
        freeze(self.frozen)

    def forward(self, text: Tensor) -> Tensor:
        x = self.frozen(self.table(text)) * self.scalar + self.cube.flatten() + self.nothing.sum()
        return self.head(self.norm(x.flatten(0, 1))).float().logsumexp(-1).mean()


def kept(seed: int) -> Kept:
    with seeded(seed):
        return Kept()


def open_kept(
    seed: int, nvme_path: Any = "", pair: tuple[str, str] = ("none", "none"), stage: int = 3, **more: Any
) -> Any:
    """(engine, scheduler) with the param groups of the kept checkpoint."""
    import zero

    model = kept(seed)
    groups = [
        {"params": [model.table.weight, model.cube], "lr": 0.01, "weight_decay": 0.1},
        {"params": [*model.norm.parameters(), model.scalar, model.nothing], "lr": 0.02, "weight_decay": 0.0},
    ]
    config = make_config(pair, nvme_path, optimizer={}, zero={"stage": stage}, **more)
    for block in ("offload_param", "offload_optimizer"):
        if config["zero_optimization"][block] == {"device": "none"}:
            del config["zero_optimization"][block]
    engine, _, _, scheduler = zero.initialize(
        model=model,
        config=config,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    return engine, scheduler


def holds(engine: Any) -> dict[str, Tensor]:
    """All values of an engine, by their names in a checkpoint; further names of tied weights are left out."""
    trainable = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    found: dict[str, Tensor] = {}
    with units_read_once(engine):
        for name, parameter in engine.module.named_parameters():
            if id(parameter) not in trainable:
                found[f"model.{name}"] = engine.full_parameter(name)
                continue
            state = engine.full_state(name)
            found[f"model.{name}"] = engine.full_master(name)
            found[f"optim.state.{name}.step"] = torch.tensor(int(state["step"]))
            found |= {f"optim.state.{name}.{kind}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return found | {f"model.{name}": buffer.detach().clone() for name, buffer in engine.module.named_buffers()}


def small(engine: Any, scheduler: Any) -> dict[str, Tensor]:
    """The other state that training continues from; draws random numbers."""
    return {
        "global_steps": torch.tensor(engine.global_steps),
        "micro_steps": torch.tensor(engine.micro_steps),
        "lr": torch.tensor([group["lr"] for group in engine.optimizer.param_groups], dtype=torch.float64),
        "scheduled": torch.tensor(scheduler.last_epoch),
        "drawn": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64),
    }


def make(folder: str) -> dict[str, Tensor]:
    """Each rank's part: train, save, and return the saved values."""
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    engine, scheduler = open_kept(seed=1)
    with engine:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + rank)
            engine.backward(engine(torch.randint(150, (4, 6), generator=generator)))
            engine.step()
        engine.save_checkpoint(folder, TAG, CLIENT)
        return {**holds(engine), **small(engine, scheduler)}
