"""Engines that save while the power fails, the disk fills up, or somebody kills them: there is always a checkpoint to
go on from, and the losses go on bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forgetful import Crash, ForgetfulFiles, every_point
from models import build, make_config, tokens
from ranks import PRELOADED
from recovery import NVME, descriptors

import zero
from offload.errors import StorageError
from offload.files.durable import Files

pytestmark = pytest.mark.broad

Open = Callable[..., Any]
TAGS = ("a", "a", "b")
"""Of the saves after steps 1, 2 and 3: a new one, one in place of another, and with `keep_last` 1 one that goes."""
POINTS = [12, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
STEPS_SEEN = 2
"""After each load."""


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    """Loading sets the global generator."""
    with torch.random.fork_rng(devices=[]):
        yield


def config(pair: tuple[str, str], nvme_path: Path, *, beside: bool = False) -> dict[str, Any]:
    return make_config(pair, nvme_path, checkpoint={"keep_last": 1, "async_save": beside})


def train(engine: Any, step: int) -> float:
    loss = engine(tokens(step))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


class Watched:
    """An engine that saves, one that loads what is left of it, and the losses of a run that nothing happens to.

    They are on different tiers, and the one that loads has been somewhere else each time.

    Args:
        beside: the next step is trained while a save is under way, and this one's updates are still to be done.
    """

    def __init__(self, open_engine: Open, nvme_path: Path, tmp_path: Path, *, beside: bool) -> None:
        tiers = (NVME, ("cpu", "cpu")) if beside else (("cpu", "cpu"), NVME)
        self.saver = open_engine(build("gpt"), config(tiers[0], nvme_path, beside=beside))
        self.loader = open_engine(build("gpt", seed=1), config(tiers[1], nvme_path))
        calm = open_engine(build("gpt"), config(("none", "none"), nvme_path))
        self.losses = [train(calm, step) for step in range(len(TAGS) + STEPS_SEEN)]
        self.place, self.count, self.beside, self.step = tmp_path, 0, beside, 0
        self.base = tmp_path / "base"
        self.base.mkdir()
        self.seen: set[tuple[int, int]] = set()
        """(steps of the checkpoint before, steps of the one that was found)."""

    def fresh(self, **faults: int) -> ForgetfulFiles:
        """A copy of the disk as it was before this save, with a fault."""
        self.count += 1
        start = ForgetfulFiles(self.base).image(self.place / f"disk{self.count}")
        return ForgetfulFiles(start, **faults)

    def save(self, files: ForgetfulFiles, tag: str) -> None:
        """Save as of the same step each time; nothing stays open, however it ends."""
        self.saver.files, steps = Files(), self.step + 1
        if self.saver.global_steps > steps:
            self.saver.load_checkpoint(self.place / "home")
        if self.saver.global_steps < steps:
            assert train(self.saver, self.step) == self.losses[self.step]
        self.saver.files, before = files, descriptors()
        try:
            self.saver.save_checkpoint(files.root / "saves", tag=tag, client_state={"steps": steps})
            if self.beside:
                assert train(self.saver, steps) == self.losses[steps]
                self.saver.wait_for_checkpoint()
        finally:
            with suppress(Crash, StorageError):
                self.saver.wait_for_checkpoint()
            assert descriptors() == before

    def points(self, tag: str, count: int) -> Iterator[int]:
        """Numbers of operations of this save, and one after them."""
        files = self.fresh()
        self.save(files, tag)
        yield from every_point(len(files.operations), max(count // len(TAGS), 2))

    def goes_on(self, disk: Path, before: int, after: int) -> None:
        """What is loaded from there is the checkpoint before this save or the one it makes, and the losses go on."""
        folder, client = self.loader.load_checkpoint(disk / "saves")
        if folder is None and not before:
            self.seen.add((before, 0))
            return
        steps = self.loader.global_steps
        assert steps in (before, after) and steps > 0 and client == {"steps": steps}
        for step in range(steps, steps + STEPS_SEEN):
            assert train(self.loader, step) == self.losses[step]
        self.seen.add((before, steps))

    def steps(self) -> Iterator[tuple[int, str]]:
        """(steps so far, tag of the save to try); one that nothing happens to follows."""
        for self.step, tag in enumerate(TAGS):
            if self.beside:
                self.saver.save_checkpoint(self.place / "home")
                self.saver.wait_for_checkpoint()
            yield self.step, tag
            self.save(ForgetfulFiles(self.base), tag)
            self.saver.files = Files()
            self.saver.load_checkpoint(self.base / "saves")


@pytest.fixture(params=["in the call", "beside training"])
def watched(request: pytest.FixtureRequest, open_engine: Open, nvme_path: Path, tmp_path: Path) -> Watched:
    return Watched(open_engine, nvme_path, tmp_path, beside=request.param == "beside training")


@pytest.mark.parametrize("count", POINTS)
def test_when_the_power_fails_in_a_save_there_is_a_checkpoint_and_the_losses_go_on(
    watched: Watched, count: int
) -> None:
    crashes = 0
    for step, tag in watched.steps():
        for point in watched.points(tag, count):
            files = watched.fresh(crash_at=point)
            with suppress(Crash):
                watched.save(files, tag)
            crashes += files.crashed
            image = files.image(files.root.with_name("image"), seed=point)
            watched.goes_on(image, step, step + 1)
            for folder in (files.root, image):
                shutil.rmtree(folder)
    assert crashes >= count - 2 * len(TAGS)
    assert watched.seen == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3)}


@pytest.mark.parametrize("count", POINTS)
def test_when_the_disk_is_full_a_save_fails_the_old_one_is_there_and_the_next_save_works(
    watched: Watched, count: int
) -> None:
    failures = 0
    for step, tag in watched.steps():
        for point in watched.points(tag, count):
            files = watched.fresh(full_at=point)
            try:
                watched.save(files, tag)
            except StorageError as error:
                assert "ENOSPC" in str(error)
                failures += 1
                assert not [name for name in files.listing(files.root / "saves") if "partial" in name]
                watched.goes_on(files.root, step, step + 1)
                files.make_room()
                watched.save(files, tag)
            watched.goes_on(files.root, step + 1, step + 1)
            if files.full_at is not None and files.refused:  # it is saved; there was no room to remove the old one
                files.make_room()
                watched.save(files, tag)
            assert set(files.listing(files.root / "saves")) == {tag, "latest", ".lock"}
            shutil.rmtree(files.root)
    assert failures >= count // 2
    assert watched.seen >= {(0, 0), (1, 1), (2, 2), (3, 3)}


# ---- kills ----------------------------------------------------------------------------------------------------------


def live(connection: Connection, folder: str, seed: int, first: int) -> None:
    """A job's life: resume, train and save, and say so, until it is killed. Every other one saves beside training."""
    os.environ["ZERO_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    beside = seed % 2 == 1
    settings = config(NVME, Path(folder) / "nvme", beside=beside)
    engine = zero.initialize(model=build("gpt", seed=first), config=settings)[0]
    engine.load_checkpoint(Path(folder) / "saves")
    connection.send(("resumed", engine.global_steps, 0.0))
    while True:
        step = engine.global_steps
        connection.send(("trained", step, train(engine, step)))
        engine.save_checkpoint(Path(folder) / "saves", tag=f"step{step % 3}")
        connection.send(("saved", step if beside else step + 1, 0.0))  # the one before this one at least


def lived(folder: Path, seed: int, first: int) -> list[tuple[str, int, float]]:
    """Start a job, kill it somewhere, and return what it said. `first` is the seed of its weights."""
    chance = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    job = context.Process(target=live, args=(theirs, str(folder), seed, first), daemon=True)
    job.start()
    theirs.close()
    told: list[tuple[str, int, float]] = []
    try:
        for _ in range(chance.randrange(3, 9)):
            told.append(ours.recv())
        time.sleep(chance.uniform(0.0, 0.06))
    finally:
        job.kill()
        job.join()
    with suppress(EOFError):
        while True:
            told.append(ours.recv())
    ours.close()
    job.close()
    return told


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_job_that_is_killed_again_and_again_goes_on_from_its_last_checkpoint_or_a_later_one(
    kills: int, tmp_path: Path, nvme_path: Path, open_engine: Open
) -> None:
    calm, losses = open_engine(build("gpt"), config(("none", "none"), nvme_path)), list[float]()
    saves, saved, trained = tmp_path / "saves", 0, 0
    for kill in range(kills):
        # Before there is a checkpoint each job starts with the weights of `calm`; later ones must load theirs.
        told = lived(tmp_path, kill, first=kill if Files().exists(saves / "latest") else 0)
        for what, step, loss in told:
            while len(losses) <= step:
                losses.append(train(calm, len(losses)))
            if what == "resumed":
                assert saved <= step <= trained
                saved = trained = step
            elif what == "trained":
                assert loss == losses[step]
                trained = step + 1
            else:
                saved = step
        assert told
        assert len([name for name in Files().listing(saves) if name.endswith(".partial")]) <= 1, "each save sweeps"
    engine = open_engine(build("gpt", seed=9), config(("cpu", "cpu"), nvme_path))
    engine.load_checkpoint(saves)
    assert saved <= engine.global_steps <= trained and trained > 0
    for step in range(engine.global_steps, engine.global_steps + STEPS_SEEN):
        while len(losses) <= step:
            losses.append(train(calm, len(losses)))
        assert train(engine, step) == losses[step]
    engine.save_checkpoint(saves, tag="last")
    assert set(Files().listing(saves)) == {"last", "latest", ".lock"}
