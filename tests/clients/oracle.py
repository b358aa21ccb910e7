"""The same scripts on DeepSpeed itself and on us, and how far apart they may be: see `oracle_rows` for the scripts.

with Both() as both:
    compared = both.run(ROWS["Trainer, stage 3"])
    print(compared.table()); assert compared.apart() == []
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed_run
import torch
from client_process import ROOT, Clients
from tuning_checks import PLACES, ULP, preloaded

ALIAS = ROOT / "zero" / "compat" / "alias"
NUMBERS = ("train_loss", "loss", "grad_norm", "eval_losses")
"""What rounds; `learning_rate` and `steps` do not."""
EXACT = ("steps", "best", "dtypes")

why_not = deepspeed_run.why_not


@dataclass(frozen=True, kw_only=True)
class Row:
    """A script and its arguments.

    Attributes:
        config: of DeepSpeed.
        case: in `oracle_cases`.
        ranks: how many processes.
        more: arguments of the case.
        known: why the two differ.
        resumed: of a run that saves, the checkpoint from which a second one goes on; that one is compared.
    """

    config: dict[str, Any]
    case: str = "train"
    ranks: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    resumed: str | None = None
    known: str | None = None


@dataclass(frozen=True)
class Compared:
    """Two runs, and a third of ours from weights that differ by one unit in their last place."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    moved: dict[str, Any]

    def gaps(self) -> dict[str, tuple[float, float]]:
        """By what is told: how far apart the two are at most, and how far they may be.

        What one unit of the initial weights does to a run is what one rounding does. Each step may round in another
        order at two places, the norm with its coefficient and the update, so the bound is that often.
        """
        steps = self.theirs["steps"][0]
        found = {}
        for name in (*NUMBERS, "weights"):
            ours, theirs, moved = (_flat(run[name]) for run in (self.ours, self.theirs, self.moved))
            if len(ours) != len(theirs):
                found[name] = (float("inf"), 0.0)
            elif len(ours):
                unit = ULP * float(theirs.abs().max())
                bound = steps * PLACES * (float((moved - ours).abs().max()) + unit)
                found[name] = (float((ours - theirs).abs().max()), bound)
        return found

    def apart(self) -> list[str]:
        """What is not the same, in words; empty when everything is."""
        told = [f"{n}: {gap:.3g} apart, {may:.3g} allowed" for n, (gap, may) in self.gaps().items() if not gap <= may]
        for name in EXACT:
            if self.ours.get(name) != self.theirs.get(name):
                told.append(f"{name}: {self.ours.get(name)} against {self.theirs.get(name)}")
        rates = self.ours["learning_rate"], self.theirs["learning_rate"]
        near = len(rates[0]) == len(rates[1]) and all(abs(a - b) <= ULP * abs(b) for a, b in zip(*rates, strict=True))
        return told if near else [*told, f"learning_rate: {rates[0]} against {rates[1]}"]


def _flat(values: Any) -> torch.Tensor:
    if isinstance(values, dict):
        return torch.cat([values[name].double().flatten() for name in sorted(values)])
    return torch.tensor(values, dtype=torch.float64)


class Both:
    """A process with the alias first on its path, and one with DeepSpeed itself; cases run in forks of them."""

    def __init__(self) -> None:
        real = {"DS_ACCELERATOR": "cpu", "PATH": deepspeed_run.search_path(), "LOCAL_SIZE": "2"}
        self._folder = Path(tempfile.mkdtemp(prefix="oracle-"))
        self._sides = {
            "ours": Clients(ALIAS, preloaded=("deepspeed", *preloaded())),
            "theirs": Clients(None, real, preloaded=("deepspeed", *preloaded())),
        }

    def run(self, row: Row) -> Compared:
        """Run the row three times, or six where it resumes."""
        return Compared(self.one("ours", row), self.one("theirs", row), self.one("ours", row, ulps=1))

    def one(self, side: str, row: Row, ulps: int = 0) -> dict[str, Any]:
        """What the first rank tells on a side."""
        folder = self._folder / "out"
        shutil.rmtree(folder, ignore_errors=True)
        more = {**row.more, "ulps": ulps}
        if row.case == "train":
            more["output_dir"] = str(folder)
        told = self._run(side, row, more)
        if row.resumed is not None:
            told = self._run(side, row, {**more, "resume": str(folder / row.resumed)})
        if (told["engine"] == "deepspeed") is not (side == "theirs"):
            raise AssertionError(f"{side} ran on {told['engine']}")
        told["dtypes"] = {name: str(value.dtype) for name, value in told["weights"].items()}
        return told

    def _run(self, side: str, row: Row, more: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = self._sides[side].run_ranks(row.ranks, f"oracle_cases:{row.case}", row.config, **more)[0]
        return told

    def close(self) -> None:
        """End both processes; nothing of them is left."""
        for side in self._sides.values():
            side.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Both:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
