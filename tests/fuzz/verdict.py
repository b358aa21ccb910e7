"""Runs cases, says what differs, and makes a script that fails shorter.

    python tests/fuzz/verdict.py --seed 17 --ranks 2     # one case: what it is, what differs, what is left of it

A case that is not equal to its witness differs in its first operation that shows a difference.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from fuzz.cases import Case, drawn
from fuzz.sides import Each
from fuzz.trained import trained
from fuzz.witness import Witness
from ranks import RankPool
from ranks_runs import quiet

Pool = Callable[[int], RankPool]
RUN_SECONDS = 60.0
NORM_ERROR = 1e-12
"""Relative: an fp64 sum in another order."""


def no_pool(ranks: int) -> RankPool:
    """For cases of one rank."""
    raise ValueError(f"{ranks} ranks need a pool")


def wrong_with(case: Case, pool: Pool) -> str:
    """What is first wrong, in words; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = Witness(case).run()
            if case.run.ranks == 1:
                ranks = [trained(case, folder)]
            else:
                ranks = pool(case.run.ranks).run(trained, case, folder, timeout_seconds=RUN_SECONDS)
        except BaseException as error:
            if case.run.ranks > 1:  # ranks that were interrupted would answer the next case with this one's
                pool(case.run.ranks).restart()
            if not isinstance(error, Exception):
                raise
            return "".join(traceback.format_exception(error))
    names = [*(f"operation {number}, {op.kind}{op.args}" for number, op in enumerate(case.ops)), "the end"]
    for name, theirs, *mine in zip(names, expected, *ranks, strict=True):
        for rank, told in enumerate(mine):
            found = [f"{key}: {line}" for key in theirs for line in differs(told.get(key), theirs[key], rank)]
            if found or told.keys() != theirs.keys():
                return f"{name}, rank {rank}:\n    " + "\n    ".join(found[:8] or [str(told.keys() ^ theirs.keys())])
    return ""


def differs(mine: Any, theirs: Any, rank: int) -> list[str]:
    """How a value is not the witness's, in words."""
    if isinstance(theirs, Each):
        return differs(mine, theirs[rank], rank)
    if isinstance(theirs, list) and isinstance(mine, list) and len(mine) == len(theirs):
        return [line for one, other in zip(mine, theirs, strict=True) for line in differs(one, other, rank)]
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return [f"{mine.dtype} {tuple(mine.shape)}, expected {theirs.dtype} {tuple(theirs.shape)}"]
        if torch.equal(mine, theirs):
            return []
        unequal, gap = (mine != theirs).sum(), (mine.double() - theirs.double()).abs().max()
        return [f"{unequal} of {mine.numel()} differ, by up to {gap:.3g} of {theirs.abs().max():.3g}"]
    if isinstance(theirs, float) and isinstance(mine, float):
        return [] if math.isclose(mine, theirs, rel_tol=NORM_ERROR) else [f"{mine!r}, expected {theirs!r}"]
    return [] if mine == theirs else [f"{mine}, expected {theirs}"]


def kind_of(wrong: str) -> str:
    """A shorter script is to fail alike: with a difference, or with an error."""
    return wrong and ("error" if "Traceback" in wrong else "difference")


def shrunken(case: Case, wrong: str, pool: Pool, runs: int) -> Case:
    """A case that fails too, with operations left out while it does; after at most so many runs."""
    at, kind = 0, kind_of(wrong)
    while at < len(case.ops) and runs:
        less = replace(case, ops=case.ops[:at] + case.ops[at + 1 :])
        runs -= 1
        if kind_of(wrong_with(less, pool)) == kind:
            case = less
        else:
            at += 1
    return case


def report(case: Case, wrong: str, pool: Pool, runs: int) -> str:
    """What failed, how to see it again, and what is left of it."""
    less = shrunken(case, wrong, pool, runs)
    again = f"python tests/fuzz/verdict.py --seed {case.seed} --ranks {case.run.ranks}"
    return f"{case}\n{wrong}\nagain: {again}\nof its operations these are enough:\n{less}\n{wrong_with(less, pool)}"


def failures(seeds: range, ranks: int, pool: Pool = no_pool, *, runs: int = 30) -> str:
    """The report of the first seed that fails; empty if none does."""
    for seed in seeds:
        case = drawn(seed, ranks)
        if wrong := wrong_with(case, pool):
            return report(case, wrong, pool, runs)
    return ""


def main() -> int:
    """Run the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=30, help="to make a script that fails shorter")
    given = parser.parse_args()
    os.environ.setdefault("ZERO_DEVICE", "cpu")
    quiet()
    torch.set_num_threads(1)
    pools: dict[int, RankPool] = {}
    try:
        seeds = range(given.seed, given.seed + given.seeds)
        told = failures(seeds, given.ranks, lambda ranks: pools.setdefault(ranks, RankPool(ranks)), runs=given.runs)
    finally:
        for pool in pools.values():
            pool.close()
    print(told or f"nothing is wrong with {given.seeds} cases from seed {given.seed} on")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
