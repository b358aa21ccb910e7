"""The model and the run of the checkpoint tests: a model with many awkward cases, and a run with known states.

A run draws from every generator of random numbers, so a generator that is not restored changes the next loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models import LoraLinear, freeze, make_config, next_token_loss, seeded, tokens, trainability
from reference import snapshot
from torch import Tensor, nn

VOCAB, WIDTH, HIDDEN = 90, 21, 67
WIDE_VOCAB = 1_500
LIVE_NUMEL = 24_000
"""A live limit under which the wide table is split into tiles and the rest is not."""
GROUP_NUMEL = 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        return x + F.dropout(self.down(F.gelu(self.up(normed))), 0.2, self.training)


class Odd(nn.Module):
    """A table, two blocks, parameters of 0, 1 and 3 dimensions and of no elements, buffers of every kind.

    Args:
        kind: "plain"; "tied": head and table are one; "frozen": table and a block are frozen; "lora": all is frozen
            except adapters; "wide": the table is split into tiles.
    """

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        rows = WIDE_VOCAB if kind == "wide" else VOCAB
        self.table = nn.Embedding(rows, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(0.1 * torch.randn(3, 7, 5))
        self.head = nn.Linear(WIDTH, rows, bias=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("turned", torch.randn(5, 3).t())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("precise", torch.randn(4, dtype=torch.float64))
        self.register_buffer("passing", torch.randn(3), persistent=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "frozen":
            freeze(self.table)
            freeze(self.blocks[1])
        if kind == "lora":
            freeze(self)
            for block in self.blocks:
                block.up = LoraLinear(block.up)

    def forward(self, text: Tensor, noise: float = 0.0) -> Tensor:
        x = self.table(text) * self.scalar + self.cube.flatten()[:WIDTH] * noise + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.turned *= 1.01
        return next_token_loss(self.head(x + self.turned.float().mean()), text)


KINDS = ("plain", "tied", "frozen", "lora", "wide")


def odd(kind: str = "plain", seed: int = 0) -> Odd:
    """A model whose weights depend only on the seed."""
    with seeded(seed):
        return Odd(kind)


@dataclass(frozen=True)
class Case:
    """One training."""

    kind: str = "plain"
    stage: int = 3
    params: str = "none"
    states: str = "none"
    bf16: bool = True
    groups: int = 1
    state_dtype: str = "fp32"
    accumulation: int = 1
    clipping: float = 0.5
    group_numel: int = GROUP_NUMEL
    beside: bool = False
    """Checkpoints are written while training continues."""
    more: tuple[tuple[str, Any], ...] = field(default=())
    """Further keys of the whole config."""

    def elsewhere(self, **changes: Any) -> Case:
        """The same training with other placements or settings."""
        return replace(self, **changes)

    def config(self, nvme_path: Any) -> dict[str, Any]:
        """The config for `zero.initialize`."""
        zero = {
            "stage": self.stage,
            "stage3_max_live_parameters": LIVE_NUMEL,
            "sub_group_size": self.group_numel,
            **({"offload_optimizer": {"state_dtype": self.state_dtype}} if self.state_dtype != "fp32" else {}),
        }
        config = make_config(
            (self.params if self.stage == 3 else "none", self.states),
            nvme_path,
            accumulation=self.accumulation,
            clipping=self.clipping,
            bf16=self.bf16,
            zero=zero,
            optimizer={},
            **({"checkpoint": {"async_save": True}} if self.beside else {}),
            **dict(self.more),
        )
        for block in ("offload_param", "offload_optimizer"):
            if config["zero_optimization"][block] == {"device": "none"}:
                del config["zero_optimization"][block]
        return config


def group_of(name: str, groups: int) -> int:
    """The index of the param group that has a parameter."""
    return sum(map(ord, name)) % groups


class Training:
    """An engine with its model and scheduler.

    Args:
        case: the training and its placement.
        nvme_path: for swap files.
        seed: of the initial weights.
        model: None: `odd`.
    """

    def __init__(self, case: Case, nvme_path: Any, seed: int = 0, model: nn.Module | None = None) -> None:
        import zero

        self.case, self.model = case, odd(case.kind, seed) if model is None else model
        self.names = trainability(self.model)
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": 1e-2 / (1 + i), "weight_decay": 0.1 * i} for i in range(case.groups)
        ]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                groups[group_of(name, case.groups)]["params"].append(parameter)
        self.engine, _, _, self.scheduler = zero.initialize(
            model=self.model,
            config=case.config(nvme_path),
            optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done),
        )

    def train(self, index: int) -> float:
        """Train on micro-batch number `index`."""
        text = tokens(index, batch=4, vocab=self.model.table.num_embeddings)
        loss = self.engine(text, noise=random.random() + float(np.random.rand()))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """All state that training continues from, except collected gradients."""
        held = {**snapshot(self.engine, self.names), **self.small()}
        buffers = {f"buffer {name}": buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        return held | {name: value for name, value in buffers.items() if "passing" not in name}

    def small(self) -> dict[str, Tensor]:
        """Counters, hyper-parameters, random states."""
        python, numpy = random.getstate(), np.random.get_state(legacy=True)
        groups = self.engine.optimizer.param_groups
        return {
            "global_steps": torch.tensor(self.engine.global_steps),
            "micro_steps": torch.tensor(self.engine.micro_steps),
            "lr": torch.tensor([group["lr"] for group in groups], dtype=torch.float64),
            "decay": torch.tensor([group["weight_decay"] for group in groups], dtype=torch.float64),
            "scheduled": torch.tensor(self.scheduler.last_epoch),
            "scheduled lr": torch.tensor(self.scheduler.get_last_lr(), dtype=torch.float64),
            "python rng": torch.tensor(python[1]),
            "numpy rng": torch.tensor([*map(int, numpy[1]), numpy[2]]),
            "torch rng": torch.get_rng_state(),
        }

    def close(self) -> None:
        self.engine.close()


@contextmanager
def training(case: Case, nvme_path: Any, **more: Any) -> Iterator[Training]:
    """A `LoaderSettings`, closed at the end."""
    opened = Training(case, nvme_path, **more)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Inside, random numbers are the same each time; afterwards the former random states are restored."""
    python, numpy = random.getstate(), np.random.get_state()
    with seeded(5):
        random.seed(5)
        np.random.seed(5)
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@dataclass
class Uninterrupted:
    """The state of an uninterrupted training after each micro-batch."""

    states: list[dict[str, Tensor]]
    losses: list[float]


def uninterrupted(case: Case, nvme_path: Any, count: int) -> Uninterrupted:
    """The run with which all others are compared."""
    with generators_kept(), training(case, nvme_path) as run:
        states, losses = [run.state()], []
        for index in range(count):
            losses.append(run.train(index))
            states.append(run.state())
    return Uninterrupted(states, losses)
