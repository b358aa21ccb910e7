"""Models of many small units: what the schedule does at a use does not grow with the number of units."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import make_config
from torch import nn

WIDTH, EXPERTS = 8, 16
EXPERT_NUMEL = 2 * WIDTH * 2 * WIDTH


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Mixture(nn.Module):
    """Each row goes to one expert: most experts have rows, and some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_row = (x.float().abs().sum(-1) * 1000).long() % EXPERTS
        for index in sorted(set(of_row.tolist())):
            rows = (of_row == index).nonzero()[:, 0]
            x = x.index_add(0, rows, self.experts[index](x[rows]))
        return x


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Calls:
    """Counts the calls of functions of the schedule, and each value that one of its generators gives."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        def heard(frame: FrameType, event: str, _: Any) -> None:
            self.count += event == "call" and Path(frame.f_code.co_filename).parts[-3:-1] == ("zero", "cache")

        sys.setprofile(heard)
        try:
            yield
        finally:
            sys.setprofile(None)


def train(engine: Any, x: torch.Tensor, calls: Calls) -> None:
    for step in range(3):
        if step < 2:
            engine.backward(engine(x))
        else:
            with calls.counted():
                engine.backward(engine(x))
        engine.step()


def generate(engine: Any, x: torch.Tensor, calls: Calls) -> None:
    engine.eval()
    for _ in range(2):
        with engine.generation(), torch.no_grad(), calls.counted():
            for _ in range(3):
                engine(x)


# Where all units of a training step stay, each use still looks at all that follow.
@pytest.mark.parametrize(("work", "fitting"), [(train, 24), (generate, 24), (generate, 10**6)])
def test_the_work_at_a_use_does_not_grow_with_the_number_of_units(
    work: Callable[..., None], fitting: int, open_engine: Callable[..., Any], nvme_path: Path
) -> None:
    per_use: list[float] = []
    for layers in (4, 12):
        limits = {"stage3_max_live_parameters": fitting * EXPERT_NUMEL, "stage3_prefetch_bucket_size": EXPERT_NUMEL}
        torch.manual_seed(0)
        engine = open_engine(Layers(layers), make_config(("none", "none"), nvme_path, zero=limits))
        calls = Calls()
        work(engine, torch.randn(64, WIDTH).bfloat16(), calls)
        per_use.append(calls.count / len(engine.units))
        engine.close()
    assert per_use[1] < 1.2 * per_use[0], per_use
