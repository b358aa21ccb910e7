"""A rank that is killed takes the job with it: the others say who it was, and nothing stays behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from models import trainability
from probe import deaf_while_waiting, withhold_slices
from ranks import RankError, RankPool
from ranks_model import motley
from ranks_runs import Place, Run, engine_config, outcome_of, quiet, train
from shared_names import left_behind, shared_names

SURVIVAL_SECONDS = 10.0
PLACES = (Place(3, "nvme", "nvme"), Place(2, "none", "cpu"), Place(3, "nvme", "nvme", shared=False))


def all_loaded() -> None:
    """Imports take seconds on a busy machine, and end before anybody looks for a lost rank."""
    import zero.api  # noqa: F401

    quiet()


def train_for_ever(place: Place, nvme_path: str) -> None:
    import zero

    quiet()
    model = motley()
    names = trainability(model)
    run = Run(3, steps=3, agreed=True)
    with zero.initialize(model=model, config=engine_config(run, place, nvme_path))[0] as engine:
        while True:
            outcome_of(engine, names, train(engine, run))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """One of its own: a rank of it dies."""
    made = RankPool(3)
    yield made
    made.close()


def die_once(pool: RankPool, nvme_path: Path, place: Place, victim: int, after_seconds: float) -> None:
    before = shared_names()
    pool.run(all_loaded)
    pids, killed_at = pool.pids, [0.0]

    def kill() -> None:
        killed_at[0] = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)

    timer = threading.Timer(after_seconds, kill)
    timer.start()
    with pytest.raises(RankError) as told:
        pool.run(train_for_ever, place, str(nvme_path), timeout_seconds=after_seconds + 60)
    took_seconds = time.monotonic() - killed_at[0]
    timer.join()
    where = f"{place.name}, {after_seconds:.2f} s after the start"
    texts = {int(text[0]): text for text in str(told.value).split("---- rank ")[1:]}
    for rank in {0, 1, 2} - {victim}:
        assert "no answer in time" not in texts[rank], f"{where}: rank {rank} hung\n{texts[rank]}"
        assert f"rank {victim}" in texts[rank], f"{where}: rank {rank} does not say who died\n{texts[rank]}"
    assert took_seconds < SURVIVAL_SECONDS, where
    pool.close()
    assert bytes_in(nvme_path) == 0, where
    assert left_behind(before) == set(), where


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_others_name_a_rank_that_was_killed_and_nothing_stays_behind(
    pool: RankPool, nvme_path: Path, place: Place, victim: int
) -> None:
    die_once(pool, nvme_path, place, victim, random.uniform(0.05, 1.5))


def train_until_one_dies(place: Place, nvme_path: str) -> None:
    """Rank 0 gives no slice any more, and rank 2, which waits for it, hears nothing: it sees rank 0 leave first."""
    import zero

    quiet()
    rank, run = int(os.environ["RANK"]), Run(3, steps=2, agreed=True)
    with (
        deaf_while_waiting() if rank == 2 else nullcontext(),
        zero.initialize(model=motley(), config=engine_config(run, place, nvme_path))[0] as engine,
    ):
        train(engine, run)
        if rank == 0:
            withhold_slices(engine)
        if rank == 1:
            time.sleep(1.0)  # its slices are there when it dies
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            train(engine, run)


def test_a_rank_that_leaves_because_another_one_died_is_not_taken_for_the_cause(
    pool: RankPool, nvme_path: Path
) -> None:
    with pytest.raises(RankError) as told:
        pool.run(train_until_one_dies, PLACES[0], str(nvme_path), timeout_seconds=60)
    texts = {int(text[0]): text for text in str(told.value).split("---- rank ")[1:]}
    assert "rank 1" in texts[0] and "rank 1" in texts[2], texts[2]


@pytest.mark.slow
def test_so_it_is_at_fifty_moments(pool: RankPool, nvme_path: Path) -> None:
    for trial in range(50):
        die_once(pool, nvme_path, PLACES[trial % 3], trial % 3, random.uniform(0.0, 3.0))


def meet_until_one_is_lost(number: int, nvme_path: str) -> tuple[str, int]:
    """Both lose each other at meeting `number`, where files are passed on: (what they are told, meetings)."""
    import zero
    from offload.errors import PeerError
    from offload.system.descriptors import _DescriptorExchange

    quiet()
    met, introduce = [0], _DescriptorExchange.listen

    def lost(meeting: Any, share: Any) -> None:
        introduce(meeting, share)
        met[0] += 1
        if met[0] == number:
            raise PeerError("no word of who it was", [1 - int(os.environ["RANK"])])

    _DescriptorExchange.listen = lost  # type: ignore[method-assign]
    config = engine_config(Run(2), Place(3, "nvme", "nvme"), nvme_path)
    try:
        with zero.Init(config_dict_or_path=config):
            model = motley()
        zero.initialize(model=model, config=config)[0].close()
    except PeerError as error:
        return str(error), met[0]
    finally:
        _DescriptorExchange.listen = introduce  # type: ignore[method-assign]
    return "", met[0]


def test_whoever_is_lost_while_files_are_passed_on_is_named_by_rank(
    rank_pool: Callable[[int], RankPool], nvme_path: Path
) -> None:
    """At every meeting; where ranks only try whether they are on one node, they go on as if they were not."""
    told = {}
    for number in itertools.count(1):
        said = rank_pool(2).run(meet_until_one_is_lost, number, str(nvme_path))
        if said[0][1] < number:
            break
        told[number] = [text for text, _ in said]
    lost = {number: texts for number, texts in told.items() if any(texts)}
    assert len(lost) >= 5, "the file of initial values, two sorts of memory, the board and the swap files"
    for number, texts in lost.items():
        for rank, text in enumerate(texts):
            assert f"rank {1 - rank}" in text, f"meeting {number}: rank {rank} does not say who was lost: {text}"
