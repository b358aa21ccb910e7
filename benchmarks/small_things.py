"""What do many small things cost: 10,000 parameters of 10 elements, and 1,000 modules with hooks?

A whole iteration (forward, backward, step) next to torch's foreach AdamW on the same parameters, with the default
persistence threshold; and the forward of a chain of modules with an engine around it, without one, by module.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zero
from benchmarks.common import Candidate, Report, measure, parser

PARAMETERS, NUMEL, MODULES = 10_000, 10, 1_000
TURNS = 8
"""Turns of one run; the first two are not counted."""
STEP_MARK = 2.0


class Many(nn.Module):
    """Small parameters in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(NUMEL)) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        """(NUMEL,) to a scalar."""
        return torch.stack(list(self.parts)).mul(x).sum()


class Chain(nn.Module):
    """Small modules, each called once; `width` decides whether their weights stay on the device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(MODULES))

    def forward(self, x: Tensor) -> Tensor:
        """(1, width) to a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def config(tier: str, **keys: Any) -> dict[str, Any]:
    """fp32, everything on `tier`."""
    block = {"device": tier}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": block, "offload_optimizer": dict(block), **keys},
    }


def turns(make: Callable[[], tuple[Callable[[], None], Callable[[], None]]]) -> Candidate:
    """Seconds of a turn, the mean of all but the first two. `make` gives (turn, end)."""

    def run() -> dict[str, Any]:
        step, close = make()
        seconds = []
        for _ in range(TURNS):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        close()
        return {"seconds": sum(seconds[2:]) / len(seconds[2:])}

    return run


def ours_trains() -> tuple[Callable[[], None], Callable[[], None]]:
    """An engine's turn."""
    engine = zero.initialize(model=Many(), config=config("cpu"))[0]
    x = torch.randn(NUMEL)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step, engine.close


def torch_trains() -> tuple[Callable[[], None], Callable[[], None]]:
    """Plain torch's turn."""
    model, x = Many(), torch.randn(NUMEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def forward(width: int, keys: dict[str, Any] | None) -> Callable[[], tuple[Callable[[], None], Callable[[], None]]]:
    """A forward of the chain with gradients; `keys` None: without an engine."""

    def make() -> tuple[Callable[[], None], Callable[[], None]]:
        model, x = Chain(width), torch.randn(1, width)
        if keys is None:
            return lambda: model(x), lambda: None
        engine = zero.initialize(model=model, config=config("cpu", **keys))[0]
        return lambda: engine(x), engine.close

    return make


def main() -> None:
    """Measure, print and write."""
    options = parser(__doc__, rounds=7).parse_args()
    logging.getLogger("zero").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    report = Report("small_things", __doc__, options)
    series = measure(
        f"{PARAMETERS:,} parameters",
        {"ours": turns(ours_trains), "foreach": turns(torch_trains)},
        rounds=options.rounds,
    )
    report.keep(series)
    ratios = series.ratios(lambda r: r["ours"].seconds / r["foreach"].seconds)
    report.mark("an iteration / torch's foreach AdamW", ratios, at_most=STEP_MARK)
    for name, width, keys in (
        ("weights that stay", 10, {}),
        ("weights that are fetched from host memory", 10, {"stage3_param_persistence_threshold": 0}),
    ):
        candidates = {"engine": turns(forward(width, keys)), "plain": turns(forward(width, None))}
        series = measure(f"{MODULES:,} modules, {name}", candidates, rounds=options.rounds)
        report.keep(series)
        micros = 1e6 * (series.median("engine") - series.median("plain")) / MODULES
        report.figure(f"forward's overhead by module, {name} [us]", micros, f"{micros:.1f} us")
    report.finish()


if __name__ == "__main__":
    main()
