"""Did a change cost speed? Five headline figures of two commits, turn by turn, in about ten minutes.

`python -m benchmarks.guard OLD [NEW] --path FOLDER`: steps of a 110 M-parameter GPT lean on NVMe, with all memory that
is free, in host memory and on two ranks, and a checkpoint from host memory. Each commit is checked out and built beside
the other and runs its own code; NEW is the working tree unless it is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Candidate, Report, measure, parser, run_child
from benchmarks.contestants import our_config
from benchmarks.rank_contestants import ENVIRONMENT, Cell, ranks_config
from benchmarks.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[1]
SLOWER_MAX = 1.02
"""New over old: what measuring the same code twice may give."""
SHAPE, RANK_TOKENS = SHAPES["110M"], 128
COUNTS = {"warmup": 2, "steps": 4}


@contextmanager
def checked_out(commit: str, place: Path) -> Iterator[Path]:
    """The code of a commit in a folder of its own, built; gone afterwards.

    Raises CalledProcessError: there is no such commit, or it does not build.
    """
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--detach", "--force", str(place), commit], check=True, capture_output=True)
    try:
        subprocess.run([sys.executable, "-m", "native.build"], cwd=place, check=True, capture_output=True)
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=False, capture_output=True)


class Contestant:
    """One commit: its code lies in `place`, its files go below `disk`."""

    def __init__(self, place: Path, disk: Path) -> None:
        self._disk = disk
        # `env --chdir`, since a module is found in the folder that Python starts in.
        self._inside = ("env", f"--chdir={place}", f"PYTHONPATH={place}")

    def step(self, tier: str, budget: Mapping[str, Any] | None = None) -> Candidate:
        """Steps of one process."""
        config = our_config(tier, self._disk, SHAPE, budget)
        spec = {"contestant": "ours", "config": config, "path": str(self._disk), "shape": asdict(SHAPE), **COUNTS}
        return lambda: self._run("-m", "benchmarks.train_worker", json.dumps(spec))

    def ranks(self) -> Candidate:
        """Steps of two ranks at stage 3, everything in host memory."""
        shape = replace(SHAPE, sequence=RANK_TOKENS, batch=1)
        config = ranks_config(Cell(3, "cpu"), self._disk, shape)
        spec = {"contestant": "ours", "config": config, "path": str(self._disk), "shape": asdict(shape), **COUNTS}
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return lambda: self._run(*launcher, "-m", "benchmarks.ranks_worker", json.dumps(spec))

    def checkpoint(self) -> Candidate:
        """A checkpoint of weights and states in host memory, until `save_checkpoint` returns."""
        config = our_config("cpu", self._disk, SHAPE)

        def run() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="guard-", dir=self._disk) as folder:
                spec = {"does": "save", "folder": folder, "config": config, "shape": asdict(SHAPE)}
                return self._run("-m", "benchmarks.checkpoint_worker", json.dumps(spec))

        return run

    def _run(self, *arguments: str) -> dict[str, Any]:
        figures = run_child(arguments, env=ENVIRONMENT, prefix=self._inside)
        figures.pop("event", None)
        return figures


QUESTIONS = {
    "lean on NVMe": lambda contestant: contestant.step("nvme"),
    "auto": lambda contestant: contestant.step("nvme", {"host": "auto"}),
    "host memory": lambda contestant: contestant.step("cpu"),
    "two ranks": lambda contestant: contestant.ranks(),
    "checkpoint": lambda contestant: contestant.checkpoint(),
}


def main() -> None:
    """Measure, print and write. Ends with status 1 where the new code is slower, beyond doubt."""
    parsed = parser(__doc__, disk=True)
    parsed.add_argument("old", help="commit to compare with")
    parsed.add_argument("new", nargs="?", default=None, help="commit; default: the working tree as it is")
    parsed.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), help="some of them")
    options = parsed.parse_args()
    if not compare(options):
        sys.exit(1)


def compare(options: argparse.Namespace) -> bool:
    """True where no figure is slower: where the whole interval of its ratio is above the mark, it is."""
    report, disk = Report("guard", __doc__, options, folders=[options.path]), options.path.resolve()
    with (
        tempfile.TemporaryDirectory(prefix="guard-", dir=disk) as folder,
        checked_out(options.old, Path(folder, "old")) as old,
        nullcontext(ROOT) if options.new is None else checked_out(options.new, Path(folder, "new")) as new,
    ):
        slower = ask(report, options, Contestant(old, disk), Contestant(new, disk))
    report.figure("slower", slower, ", ".join(slower) or "none")
    report.finish()
    return not slower


def ask(report: Report, options: argparse.Namespace, old: Contestant, new: Contestant) -> list[str]:
    """The names of the questions in which the new code is slower."""
    slower = []
    for name in options.only:
        candidates = {"old": QUESTIONS[name](old), "new": QUESTIONS[name](new)}
        series = measure(name, candidates, rounds=options.rounds, warmups=0, disk=os.fspath(options.path))
        report.keep(series)
        report.mark(
            f"{name}: new / old", series.ratios(lambda r: r["new"].seconds / r["old"].seconds), at_most=SLOWER_MAX
        )
        if report.marks[-1]["low"] > SLOWER_MAX:
            slower.append(name)
    return slower


if __name__ == "__main__":
    main()
