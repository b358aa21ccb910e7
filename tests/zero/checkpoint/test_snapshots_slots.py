"""What the committed manifest names is never written; what a kill leaves at any point of a commit can be loaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import micro_batch, train, unequal, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, tokens
from probe import put_snapshot_files, storage_of
from snapshot_runs import (
    WatchedDisk,
    allocated_bytes,
    as_a_kill_would_leave_it,
    committed,
    config_of,
    named_bytes,
    on_middle,
)

import zero
from offload.errors import ConfigError, StorageError
from offload.files.durable import Files
from offload.io.aio import AioFault

Open = Callable[..., Any]
ACTIONS = ("train", "train", "train", "edit", "forward", "look", "zero_grad", "save", "load", "fail")


def act(engine: Any, action: str, index: int) -> None:
    if action == "train":
        micro_batch(engine, index)
    elif action == "edit":
        with torch.no_grad(), zero.GatheredParameters([engine.module.head.weight, engine.module.blocks[0].up.weight]):
            engine.module.head.weight.mul_(0.99)
            engine.module.blocks[0].up.weight[:1].add_(0.01)
    elif action == "forward":
        engine(tokens(index))
    elif action == "look":
        engine.full_state("head.weight")
    elif action == "zero_grad":
        engine.zero_grad()
    elif action == "save":
        engine.save_snapshot()
    elif action == "load":
        engine.load_snapshot()
    elif action == "fail":
        engine.inject(AioFault(fail_rate=0.3, seed=index))
        try:
            micro_batch(engine, index)
        except StorageError:
            pass
        finally:
            engine.inject(None)
            again(engine)


def again(engine: Any) -> None:
    """The disk is well again, so at most what was already under way fails."""
    for _ in range(8):
        try:
            engine.zero_grad()
            engine(tokens(0))
            engine.synchronize()
        except StorageError:
            continue
        return
    raise AssertionError("still failing on a disk that is well again")


@pytest.mark.broad
@settings(max_examples=12)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=9),
    every=st.integers(1, 3),
    pair=st.sampled_from([("nvme", "nvme"), ("cpu", "nvme")]),
    threshold=st.sampled_from([0, 200]),
    cut=st.sampled_from([4096, 10**9]),
)
def test_bytes_that_the_manifest_names_never_change(
    actions: list[str], every: int, pair: tuple[str, str], threshold: int, cut: int
) -> None:
    keys = {"stage3_param_persistence_threshold": threshold, "sub_group_size": cut}
    with tempfile.TemporaryDirectory() as path:
        engine = zero.initialize(model=build("gpt"), config=config_of(path, every, pair, zero=keys))[0]
        with engine:
            watch = WatchedDisk(engine, path)
            known: tuple[int, str] | None = None
            for index, action in enumerate(["train", "train", *actions]):
                act(engine, action, index)
                manifest = committed(path)
                if manifest is None:
                    continue
                now = manifest["number"], named_bytes(engine, path)
                assert known is None or known[0] != now[0] or known == now
                known = now
            assert watch.writes
            watch.strict = False
            assert known is None or engine.load_snapshot() is not None, "every checksum is right"


def test_a_watched_disk_sees_a_write_to_what_is_named(open_engine: Open, nvme_path: Path) -> None:
    """The property above can fail."""
    engine = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)
    watch = WatchedDisk(engine, nvme_path)
    for plane in storage_of(engine).snapshot_arrays:
        for pair in plane.pairs:
            pair.committed_slot = None
    with pytest.raises(AssertionError, match="named is"):
        train(engine, 2, 3)
        engine.synchronize()
    watch.strict = False


# ---- kills at every point of a commit -------------------------------------------------------------------------------


class Stopped(BaseException):
    """The process is killed here."""


class StoppingFiles(Files):
    """Calls `at(number, operation)` before each operation on the disk."""

    def __init__(self, at: Callable[[int, str], None]) -> None:
        self.at, self.count = at, 0

    def perform(self, operation: Any, path: Any, action: Any, new: Any = None) -> Any:
        self.count += 1
        self.at(self.count, operation)
        return super().perform(operation, path, action, new)


def test_what_a_kill_leaves_at_any_point_of_a_commit_goes_on_bit_for_bit(
    open_engine: Open, tmp_path: Path, nvme_path: Path
) -> None:
    keys = {"stage3_param_persistence_threshold": 200}
    engine = train(open_engine(build("mixed"), config_of(nvme_path, zero=keys)), 0, 1)
    found: list[Path] = []

    def copied(number: int, operation: str) -> None:
        found.append(as_a_kill_would_leave_it(nvme_path, tmp_path / f"at-{number}"))

    put_snapshot_files(engine, StoppingFiles(copied))
    train(engine, 2)
    put_snapshot_files(engine, Files())
    train(engine, 3)
    assert len(found) >= 6, "a manifest and the number: opened, written, synced"
    loaded = set()
    for path in found:
        second = open_engine(build("mixed", seed=9), config_of(path, zero=keys))
        step = second.load_snapshot()
        loaded.add(step)
        train(second, *range(step, 4))
        assert unequal(second, engine, "mixed") == []
        second.close()
        shutil.rmtree(path)
    assert loaded == {1, 2}


@pytest.mark.parametrize("name", ["committed", "manifest"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_fails_is_tried_again_and_nothing_named_changes_meanwhile(
    open_engine: Open, tmp_path: Path, nvme_path: Path, name: str, when: str
) -> None:
    """After a write that may have happened both snapshots may count."""
    engine = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)

    class Failing(Files):
        broken = True

        def perform(self, operation: Any, path: Any, action: Any, new: Any = None) -> Any:
            hit = self.broken and operation in ("write", "sync") and path.name.startswith(name)
            if hit and when == "before":
                raise StorageError(operation, errno=5, path=str(path), offset=0, free_bytes=None)
            result = super().perform(operation, path, action, new)
            if hit and operation == "sync":
                raise StorageError(operation, errno=5, path=str(path), offset=0, free_bytes=None)
            return result

    files = Failing()
    put_snapshot_files(engine, files)
    engine.backward(engine(tokens(2)))
    for _ in range(2):
        with pytest.raises(StorageError):
            engine.step()
    known = named_bytes(engine, nvme_path)
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    with torch.no_grad(), pytest.raises(StorageError), zero.GatheredParameters([engine.module.head.weight]):
        pass
    assert named_bytes(engine, nvme_path) == known
    files.broken = False
    engine.step()
    train(engine, 3)
    second = open_engine(build("gpt", seed=9), config_of(later))
    step = second.load_snapshot()
    assert step == (2 if (name, when) == ("committed", "after") else 1)
    train(second, *range(step, 4))
    assert unequal(engine, second) == []


# ---- room and what is left ------------------------------------------------------------------------------------------


def test_snapshots_take_twice_the_state_and_say_so(open_engine: Open, tmp_path: Path, nvme_path: Path) -> None:
    path = nvme_path
    for number in range(2):
        engine = open_engine(build("gpt"), config_of(path))
        state = sum(row.nbytes for row in engine.plan.rows if row.array in ("weights", "optimizer states"))
        assert engine.plan.tier_bytes("nvme") == 2 * state
        assert "twice their size" in engine.plan.table()
        step = engine.load_snapshot() or 0
        train(engine, *range(step, step + 2))
        swap = sum(os.stat(found).st_size for found in path.rglob("swap"))
        assert swap == 2 * state
        assert allocated_bytes(path) < 2 * state + 500_000, "the state beside, and two manifests"
        path = as_a_kill_would_leave_it(path, tmp_path / f"later-{number}")


def test_close_leaves_the_snapshot_that_was_committed_and_nothing_else(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)
    engine.close()
    names = sorted(path.name for path in (nvme_path / "zero-snapshots" / "default" / "rank-0").iterdir())
    assert names == ["manifest-0", "manifest-1", "part", "swap"]


@pytest.mark.usefixtures("nothing_left")
def test_close_leaves_nothing_where_nothing_was_committed(nvme_path: Path) -> None:
    engine = zero.initialize(model=build("gpt"), config=config_of(nvme_path, 10))[0]
    train(engine, 0)
    assert (nvme_path / "zero-snapshots" / "default" / "rank-0" / "swap").exists()
    engine.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_start_that_fails_leaves_nothing(nvme_path: Path) -> None:
    config = {**config_of(nvme_path), "memory_budget": {"host": 1}}
    with pytest.raises(MemoryError):
        zero.initialize(model=build("gpt"), config=config)


def test_several_paths_are_striped_and_found_again(open_engine: Open, tmp_path: Path, nvme_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()

    def config(*paths: Path) -> dict[str, Any]:
        made = config_of(paths[0])
        for block in ("offload_param", "offload_optimizer"):
            made["zero_optimization"][block]["nvme_path"] = [str(path) for path in paths]
        return made

    engine = train(open_engine(build("middle"), config(*paths)), 0, 1, loss_of=on_middle)
    before = values(engine, "middle")
    engine.close()
    assert all((path / "zero-snapshots" / "default" / "rank-0" / "swap").stat().st_size for path in paths)
    for other in ([paths[1], paths[0]], [paths[0]], [paths[1]], [*paths, nvme_path]):
        with pytest.raises(ConfigError, match=r"is part \d of 2 of snapshot 'default'"):
            open_engine(build("middle"), config(*other))
    engine = open_engine(build("middle", seed=9), config(*paths))
    assert engine.load_snapshot() == 2
    assert all(torch.equal(value, before[key]) for key, value in values(engine, "middle").items())
