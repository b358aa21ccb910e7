"""One fault at every transfer of a step: every rank ends it in the same way, can go on, and no number changes.

What could not be written is still in memory, and what could not be read is still on the disk. So a transfer that fails
once is never the end of a run, whichever it was.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import trainability
from probe import counted_transfers
from ranks import RankPool
from ranks_model import motley
from ranks_runs import Place, Run, digest, on_batch, outcome_of, quiet

import zero
from offload.errors import BudgetError, StorageError
from offload.io.aio import AioFault
from offload.io.aio_base import Op
from zero.optim.stepper import InterruptedBackward

Pool = Callable[[int], RankPool]

CODES = (errno.EIO, errno.ENOSPC)
WARM_STEPS = 2  # From then on all steps move the same bytes.
TRIES = 4

OFFLOADED = [
    *((stage, "none", "nvme") for stage in (1, 2, 3)),
    *((3, "nvme", states) for states in ("cpu", "nvme")),
]
PLACES = [
    (ranks, Place(*where, shared=shared))
    for ranks, shared, where in product((1, 2), (True, False), OFFLOADED)
    if ranks > 1 or shared
]


def opened_small(place: Place, run: Run, nvme_path: str) -> Any:
    """An engine with the least host memory, so that gradients are on NVMe too."""
    quiet()
    with pytest.raises(BudgetError, match="at least") as refusal:
        zero.initialize(model=motley(), config=place.config(run, nvme_path, host_bytes=1000))
    least = re.findall(r"at least ([\d,]+)", str(refusal.value))[0].replace(",", "")
    config = place.config(run, nvme_path, host_bytes=int(least))
    return zero.initialize(model=motley(), config=config)[0]


def train_step(engine: Any, index: int, run: Run, said: list[str]) -> list[float]:
    """One step, with what failed done again; the losses that count. `said`: the errors.

    When gradients are lost, all micro-batches of the step so far are done again: `zero_grad` keeps the position in it.
    """
    losses: list[float] = []  # Of the micro-batches whose gradients are there.
    position, call, loss = 0, "forward", torch.zeros(())
    for _ in range(8 * TRIES * run.accumulation):
        try:
            if call == "forward":
                loss = on_batch(engine, index * run.accumulation + len(losses))
                call = "backward"
            elif call == "backward":
                engine.backward(loss)
                losses.append(float(loss))
                call = "step" if len(losses) > position else "forward"
            else:
                engine.step()
                position, call = position + 1, "forward"
                if position == run.accumulation:
                    return losses
        except (StorageError, InterruptedBackward) as error:
            said.append(f"step {index}: {type(error).__name__} in {call}")
            if call == "backward" or isinstance(error, InterruptedBackward):
                engine.zero_grad()
                losses, call = [], "forward"
    raise AssertionError(f"step {index} still fails: {said}")


def train_windows(engine: Any, op: Op, run: Run, faults: int | None, said: list[str]) -> tuple[int, Any]:
    """(faults, the losses and a digest of the outcome): so often two steps, each time with another transfer that fails.

    The second step makes and stores what the first one has left to do. `faults`: None: as many as there are transfers,
    which are counted, and none of them fails.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for index in range(WARM_STEPS):
        losses += train_step(engine, index, run, said)
    engine.synchronize()
    calm, number = faults is None, 0
    while faults is None or number < faults:
        if not calm and number % ranks == rank:
            code = CODES[number // ranks % len(CODES)]
            engine.inject(AioFault(errno=code, fail_rate=1.0, ops=(op,), skip=number, count_max=1))
        with counted_transfers(engine, op) if faults is None else contextlib.nullcontext([0]) as count:
            for index in (0, 1):
                losses += train_step(engine, WARM_STEPS + 2 * number + index, run, said)
            engine.inject(None)
            synchronize(engine, said)
        if faults is None:
            counts: list[int] = [0] * ranks
            dist.all_gather_object(counts, count[0])
            faults = max(counts)
        number += 1
    return faults, (losses, digest(outcome_of(engine, trainability(motley()), [])))


def synchronize(engine: Any, said: list[str]) -> None:
    """A read ahead may have failed in the second step, and is not noticed before."""
    for _ in range(TRIES):
        try:
            return engine.synchronize()  # type: ignore[no-any-return]
        except StorageError:
            said.append("StorageError in synchronize")


def train_through_faults(place: Place, run: Run, nvme_path: str, op: Op) -> tuple[list[str], int, bool]:
    """(the errors on this rank, how many faults there were, whether the run is equal to one without faults)."""
    said: list[str] = []
    with opened_small(place, run, nvme_path) as engine:
        faults, expected = train_windows(engine, op, run, None, said)
    assert said == []
    with opened_small(place, run, nvme_path) as engine:
        _, outcome = train_windows(engine, op, run, faults, said)
    return said, faults, outcome == expected


def check(pool: RankPool, place: Place, run: Run, nvme_path: Path, op: Op) -> None:
    answers = pool.run(train_through_faults, place, run, str(nvme_path), op, timeout_seconds=280.0)
    said, faults, _ = answers[0]
    assert faults > 10
    assert [(theirs, equal) for theirs, _, equal in answers] == [(said, True)] * len(answers)
    kinds = {re.sub(r"^step \d+: ", "", error) for error in said}
    if len(answers) == 1:
        assert {kind.partition(" ")[0] for kind in kinds} == {"StorageError"}
    else:  # a gradient that is added to an unreadable one is lost
        assert kinds <= {"StorageError in step", *["InterruptedBackward in step"] * (op == "read")}
    assert said


SAMPLE = {
    (1, Place(3, "nvme", "nvme"), "write", 1),
    (2, Place(1, "none", "nvme"), "write", 1),
    (2, Place(3, "nvme", "nvme", shared=False), "write", 1),
    (2, Place(2, "none", "nvme"), "read", 1),
}
CASES = [(*where, *what) for where, what in product(PLACES, (("write", 1), ("write", 2), ("read", 1)))]


@pytest.mark.parametrize(
    ("ranks", "place", "op", "accumulation"),
    [pytest.param(*case, marks=pytest.mark.broad if case in SAMPLE else pytest.mark.slow) for case in CASES],
    ids=[f"{ranks} ranks, {place.name}, {op}, {accumulation}" for ranks, place, op, accumulation in CASES],
)
def test_a_transfer_that_fails_once_ends_a_step_alike_on_all_ranks_and_changes_no_number(
    rank_pool: Pool, nvme_path: Path, ranks: int, place: Place, accumulation: int, op: Op
) -> None:
    check(rank_pool(ranks), place, Run(ranks=ranks, accumulation=accumulation), nvme_path, op)
