"""Checkpoints that are written beside training: whatever comes between, they are of the step they were asked for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import train, unequal
from models import VOCAB, build, make_config, seeded, tokens
from probe import (
    at_each_look,
    complete,
    disk_of,
    error_of_the_save,
    is_waiting,
    load_no_states_of,
    only_updates_take,
    put_disk,
    put_exchange,
    storage_of,
    stranded_in,
    updates_of,
    used_bytes,
    wait_for_first,
)
from recovery import HELD, NVME, descriptors, failing, interrupted_when
from torch import nn

import offload.io.io_loop
import zero
from offload.errors import ConfigError, StateError, StorageError
from offload.files.archives import container
from offload.files.durable import Files
from offload.io.aio import AioOptions, open_aio
from zero.checkpoint import rank_data_file, save
from zero.checkpoint.folder import CheckpointFolder
from zero.optim.sub_group_pipeline import StepArguments
from zero.store.all_ranks import FAILED
from zero.store.collectives import Collectives

Open = Callable[..., Any]
CPU = ("cpu", "cpu")
MATRIX = "head.weight"


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    """Loading sets the global generator."""
    with torch.random.fork_rng(devices=[]):
        yield


class Held(Files):
    """A disk that makes a rank's file last only when it is told to, if at all."""

    def __init__(self, *, fails: bool = False) -> None:
        self.go, self._fails = threading.Event(), fails

    def perform(self, operation: Any, path: Path, action: Callable[[], Any], new: Path | None = None) -> Any:
        if operation == "sync" and path.suffix == ".distcp":
            assert self.go.wait(60), "nobody has told it to go on"
            if self._fails:
                raise StorageError("sync", errno=5, path=str(path), offset=0, free_bytes=None)
        return super().perform(operation, path, action, new)


def config(pair: tuple[str, str], nvme_path: Path, **more: Any) -> dict[str, Any]:
    return make_config(pair, nvme_path, checkpoint={"async_save": True}, **more)


def tags(folder: Path) -> list[str]:
    return CheckpointFolder(folder).tags()


JOB = """
import sys, torch, zero
from models import build, make_config, tokens
torch.set_num_threads(1)
config = make_config(("cpu", "cpu"), None, checkpoint={"async_save": True})
engine = zero.initialize(model=build("gpt"), config=config)[0]
engine.backward(engine(tokens(0)))
engine.step()
engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.broad
def test_a_job_that_ends_without_closing_its_engine_has_its_last_checkpoint(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(zero.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "ZERO_DEVICE": "cpu"}
    subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], env=environment, check=True, timeout=120)
    assert CheckpointFolder(tmp_path).read_latest() == "global_step1"
    assert tags(tmp_path) == ["global_step1"]


def test_an_interrupt_of_a_wait_ends_neither_the_save_nor_that_the_next_one_waits(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = train(open_engine(build("gpt"), config(CPU, nvme_path)), 0)
    engine.files = held = Held()
    engine.save_checkpoint(tmp_path, tag="a")
    with interrupted_when(lambda: True):
        engine.wait_for_checkpoint()
    assert engine.checkpoint_pending()
    with interrupted_when(lambda: True):
        engine.save_checkpoint(tmp_path, tag="b")
    assert tags(tmp_path) == []
    held.go.set()
    engine.save_checkpoint(tmp_path, tag="b")
    assert tags(tmp_path) == ["a"] or tags(tmp_path) == ["b", "a"]
    engine.wait_for_checkpoint()
    assert tags(tmp_path) == ["b", "a"]


def test_an_edit_is_not_lost_when_the_checkpoint_that_it_waits_for_fails(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = train(open_engine(build("gpt"), config(NVME, nvme_path)), 0)
    expected = engine.full_parameter(MATRIX) * 2
    engine.files = held = Held(fails=True)
    engine.save_checkpoint(tmp_path)
    with zero.GatheredParameters([engine.module.head.weight]):
        engine.module.head.weight.data.mul_(2)
        held.go.set()
    with pytest.raises(StorageError, match="sync"):
        engine.synchronize()
    engine.synchronize()
    assert torch.equal(engine.full_parameter(MATRIX), expected)


class LameDisk:
    """The disk of a plane: one read fails at once, others take a while."""

    def __init__(self, plane: Any) -> None:
        self._disk, self._failed, self.under_way = disk_of(plane), False, 0

    async def read(self, offset: int, buffer: torch.Tensor, what: str = "") -> None:
        if not self._failed:
            self._failed = True
            raise StorageError("read", errno=5, path="plane", offset=offset, free_bytes=None)
        self.under_way += 1
        await asyncio.sleep(0.2)
        await self._disk.read(offset, buffer, what)
        self.under_way -= 1


def test_a_save_that_fails_ends_when_nothing_of_it_moves_any_more(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = train(open_engine(build("gpt"), config(("cpu", "nvme"), nvme_path, zero={"sub_group_size": 4096})), 0)
    engine.synchronize()
    (plane,) = (plane for plane in storage_of(engine).state_arrays if plane is not None)
    before, disk, lame = descriptors(), disk_of(plane), LameDisk(plane)
    put_disk(plane, lame)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(StorageError, match="read"):
        engine.wait_for_checkpoint()
    put_disk(plane, disk)
    assert lame.under_way == 0
    assert descriptors() == before
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    calm = train(open_engine(build("gpt"), config(CPU, nvme_path)), 0, 1)
    assert not unequal(train(engine, 1), calm)


def test_after_a_failure_no_further_extent_is_begun() -> None:
    """Those beside it end first."""
    extents = object.__new__(rank_data_file.ExtentWriter)
    extents.is_stopped, begun, ended = False, list[int](), list[int]()

    async def write(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0.01 * number)
        if number == 1:
            raise StorageError("write", errno=5, path="file", offset=0, free_bytes=None)
        ended.append(number)

    with pytest.raises(StorageError):
        asyncio.run(extents.write_all(range(1, 9), write, 2))  # type: ignore[arg-type]
    assert begun == [1, 2] and ended == [2]


def test_a_step_that_begins_while_a_sub_group_is_looked_at_does_not_wait_for_the_save_that_waits_for_it(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = train(open_engine(build("gpt"), config(NVME, nvme_path, zero={"sub_group_size": 4096})), 0)
    engine.synchronize()
    updates = updates_of(engine)
    is_busy = updates.is_busy

    def meanwhile(group: Any) -> bool:
        """Another thread fixes a step, which changes nothing."""
        monkeypatch.setattr(updates, "is_busy", is_busy)
        updates.begin_step(StepArguments({}, 1.0, 2), [group])
        return bool(is_busy(group))

    monkeypatch.setattr(updates, "is_busy", meanwhile)
    engine.save_checkpoint(tmp_path)
    assert error_of_the_save(engine, 60) is None
    engine.synchronize()
    assert tags(tmp_path) == ["global_step1"]


class Broad(nn.Module):
    """Each layer is a sub-group of full size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 768).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(768, 768, bias=False) for _ in range(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def same_values(one: Any, other: Any) -> bool:
    pairs = zip(one.named_full_parameters(), other.named_full_parameters(), strict=True)
    return all(name == its and torch.equal(value, kept) for (name, value), (its, kept) in pairs)


BROAD = {
    **{"sub_group_size": 768 * 768, "stage3_max_live_parameters": 2_000_000, "stage3_prefetch_bucket_size": 300_000},
    "offload_param": {"buffer_count": 1, "buffer_size": 1},
}
"""A record takes 6 MB of the arena, which has room for those of four updates and 4 MiB."""


def test_updates_that_cannot_be_written_leave_a_save_beside_them_right(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits for the save to take its sub-group first."""
    engines = []
    for _ in range(3):
        with seeded(0):
            engines.append(open_engine(Broad(), config(NVME, nvme_path, zero=BROAD)))
    engine, calm, loaded = engines
    train(engine, 0)
    engine.synchronize()
    take_all = only_updates_take(monkeypatch, 0.1)
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(tokens(1)))
    engine.inject(failing("write"))
    engine.step()
    for _ in range(3):
        with pytest.raises(StorageError, match="write"):
            engine.synchronize()
    engine.inject(None)
    engine.synchronize()
    take_all()
    engine.wait_for_checkpoint()
    loaded.load_checkpoint(tmp_path)
    assert same_values(loaded, train(calm, 0))
    assert same_values(engine, train(calm, 1))
    assert same_values(train(loaded, 1), calm)


def test_results_that_cannot_be_written_keep_no_memory_that_a_save_waits_for(
    open_engine: Open, nvme_path: Path
) -> None:
    """An update may wait for the save, and no write is tried again before the update has gone on."""
    engine = train(open_engine(Broad(), make_config(NVME, nvme_path, zero=BROAD)), 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing("write"))
    engine.step()
    with pytest.raises(StorageError, match="write"):
        engine.synchronize()
    assert any(stranded_in(plane) for plane in storage_of(engine).state_arrays if plane is not None)
    assert used_bytes(engine, "host_pool") == 0
    engine.inject(None)
    engine.synchronize()


class SlowRank:
    """A save of two ranks, as the first one sees it: the other writes this often before its part is complete."""

    tag = "slow"

    def __init__(self, writes: int, pause: int) -> None:
        self._looks, self._end, self._pause, self.complete = 0, writes * pause, pause, False

    def missing_parts(self) -> dict[int, object]:
        self._looks += 1
        return {} if self._looks > self._end else {1: self._looks // self._pause}

    def ended_ranks(self, ranks: Collection[int]) -> dict[int, str]:
        return {}

    def assemble(self, *, save_latest: bool) -> None:
        self.complete = True


def test_the_first_rank_waits_for_one_that_is_slow_as_long_as_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(save, "PEER_TIMEOUT_SECONDS", 0.5)
    slow = SlowRank(writes=50, pause=3)
    complete(slow)
    assert slow.complete
    silent = SlowRank(writes=1, pause=10_000)
    with pytest.raises(StateError, match=r"ranks \[1\] have written nothing"):
        complete(silent)
    assert not silent.complete


class LostFirstRank:
    """A save of two ranks, as the other one sees it: the first has ended on a machine of which nobody hears."""

    tag = "lost"

    def is_completed(self) -> bool:
        return False

    def missing_parts(self) -> dict[int, object]:
        return {}

    def ended_ranks(self, ranks: Collection[int]) -> dict[int, str]:
        return {}


class RenamingFirstRank(LostFirstRank):
    """The first rank renames the folder just after the other has looked into it."""

    has_renamed = False

    def is_completed(self) -> bool:
        return self.has_renamed

    def missing_parts(self) -> dict[int, object]:
        self.has_renamed = True
        raise StorageError("read", errno=2, path="data-0", offset=0, free_bytes=None)


def test_a_folder_that_is_renamed_between_two_looks_is_complete() -> None:
    wait_for_first(RenamingFirstRank())


def test_another_rank_does_not_wait_for_ever_for_a_first_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(save, "PEER_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(StateError, match="rank 0 has not completed lost"):
        wait_for_first(LostFirstRank())


# ---- saves in the call -----------------------------------------------------------------------------------------------


def test_an_interrupt_of_a_save_leaves_nothing_and_the_next_one_works(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = train(open_engine(build("gpt"), make_config(NVME, nvme_path)), 0)
    engine.synchronize()
    before, opened = descriptors(), list[Any]()

    def open_held(options: AioOptions) -> Any:
        aio = open_aio(options)
        aio.inject(HELD)
        opened.append(aio)
        return aio

    def ready() -> bool:
        if not (opened and is_waiting(engine)):
            return False
        opened[-1].inject(None)  # what cleans up waits for the transfers
        return True

    with monkeypatch.context() as slow:
        slow.setattr(rank_data_file, "open_aio", open_held)
        with interrupted_when(ready):
            engine.save_checkpoint(tmp_path)
    opened.clear()
    assert descriptors() == before
    assert [name for name in Files().listing(tmp_path) if name != nvme_path.name] == [".lock"]
    engine.save_checkpoint(tmp_path)
    assert tags(tmp_path) == ["global_step1"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_save_may_take_long_though_the_engine_has_no_disk_of_its_own(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that the save writes count as moved: a large model in host memory takes minutes to write."""
    engine = train(open_engine(build("gpt"), make_config(CPU, tmp_path, zero={"sub_group_size": 4096})), 0)
    engine.synchronize()

    opened, seen = list[Any](), set[int]()

    def open_held(options: AioOptions) -> Any:
        opened.append(open_aio(options))
        opened[-1].inject(HELD)
        return opened[-1]

    def look() -> None:
        with suppress(StateError):  # the save has ended, and closed it
            for aio in opened:
                aio.inject(HELD)  # what was held goes on, what comes after it is held until the next look
                seen.add(aio.stats().write_bytes)

    monkeypatch.setattr(rank_data_file, "open_aio", open_held)
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.5)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.5)
    monkeypatch.setattr(offload.io.io_loop, "time", SimpleNamespace(perf_counter=lambda: 0.4 * len(seen)))
    with at_each_look(engine, look):
        engine.save_checkpoint(tmp_path)
    assert 0.4 * len(seen) > 0.6 and tags(tmp_path) == ["global_step1"]


@pytest.mark.parametrize("pair", [CPU, NVME])
def test_the_default_device_of_a_program_has_no_part_in_a_checkpoint(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    engine = train(open_engine(build("gpt"), make_config(pair, nvme_path)), 0)
    other = open_engine(build("gpt", seed=1), make_config(pair, nvme_path))
    container.cache_clear()
    with torch.device("meta"):
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
    assert not unequal(engine, other)


class Clinging(Files):
    """A disk that removes no folder."""

    def perform(self, operation: Any, path: Path, action: Callable[[], Any], new: Path | None = None) -> Any:
        if operation == "remove folder":
            raise StorageError("remove folder", errno=5, path=str(path), offset=0, free_bytes=None)
        return super().perform(operation, path, action, new)


def test_a_checkpoint_is_saved_although_an_old_one_cannot_be_removed(
    open_engine: Open, nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = train(open_engine(build("gpt"), make_config(CPU, nvme_path, checkpoint={"keep_last": 1})), 0)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.files = Clinging()
    assert engine.save_checkpoint(tmp_path, tag="b")
    assert "older ones could not be removed" in caplog.text
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "b")


# ---- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_moments_that_a_source_does_not_have_stay(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dtype: str
) -> None:
    block = {"offload_optimizer": {"device": "cpu", "state_dtype": state_dtype}}
    engine = train(open_engine(build("gpt"), make_config(CPU, nvme_path, zero=block)), 0)
    engine.save_checkpoint(tmp_path)
    train(engine, 1, 2)
    names = [name for name, _ in engine.module.named_parameters()]
    now = {name: engine.full_state(name) for name in names}
    lacking = set(names[::2])
    load_no_states_of(lacking, monkeypatch)
    engine.load_checkpoint(tmp_path)
    for name in names:
        found = engine.full_state(name)
        for kind in ("exp_avg", "exp_avg_sq"):
            # 8-bit codes share their scale with 255 neighbours, of other parameters too.
            inside = slice(256, -256) if state_dtype == "8bit" else slice(None)
            is_same = torch.equal(found[kind].flatten()[inside], now[name][kind].flatten()[inside])
            assert is_same or name not in lacking, (name, kind)
            assert not is_same or name in lacking or found[kind].numel() <= 512, (name, kind)
        assert found["step"] == (3 if name in lacking else 1)


# ---- weights that forward modifies -----------------------------------------------------------------------------------


class Counting(nn.Module):
    """Its forward adds to weights of every size, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.small, self.large = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(6000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for line in self.lines:
            x = x + line(x)
        if self.training:
            with torch.no_grad():
                self.small.add_(1.0)
                self.large.add_(1.0)
        return (x * self.small).sum() + self.large.sum()


@pytest.mark.parametrize("after", ["forward", "backward", "step"])
@pytest.mark.parametrize("pair", [("none", "none"), CPU, NVME])
@pytest.mark.parametrize("threshold", [0, 1000])
def test_weights_that_forward_modifies_are_saved_as_they_were_when_a_save_began(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str], threshold: int, after: str
) -> None:
    zero_block = {"sub_group_size": 4096, "stage3_param_persistence_threshold": threshold}
    engine = open_engine(Counting(), config(pair, nvme_path, bf16=False, zero=zero_block))
    batch = torch.ones(2, 64)

    def train_until(last: str) -> None:
        loss = engine(batch)
        if last != "forward":
            engine.backward(loss)
        if last == "step":
            engine.step()

    train_until("step")
    train_until(after)
    names = [name for name, _ in engine.module.named_parameters()]
    expected = {name: engine.full_parameter(name) for name in names}
    engine.save_checkpoint(tmp_path)
    assert {name for name in names if not torch.equal(engine.full_parameter(name), expected[name])} == set()
    engine.zero_grad()
    for _ in range(2):
        train_until("step")
    engine.wait_for_checkpoint()
    engine.load_checkpoint(tmp_path)
    assert {name for name in names if not torch.equal(engine.full_parameter(name), expected[name])} == set()


def test_a_model_that_has_modified_weights_once_is_not_saved_beside_training(
    open_engine: Open, nvme_path: Path, tmp_path: Path, caplog: Any
) -> None:
    """It may do it again, however long ago that was."""
    engine = open_engine(Counting(), config(CPU, nvme_path, bf16=False))
    for number in range(4):
        engine.train(number == 0)
        engine.backward(engine(torch.ones(2, 64)))
        engine.step()
    engine.save_checkpoint(tmp_path)
    assert "weights have been modified in place" in caplog.text


def test_an_edit_long_ago_keeps_no_later_save_from_training(
    open_engine: Open, nvme_path: Path, tmp_path: Path, caplog: Any
) -> None:
    keys = {"stage3_param_persistence_threshold": 100_000}
    engine = open_engine(build("gpt"), config(CPU, nvme_path, zero=keys))
    with zero.GatheredParameters([engine.module.norm.weight]):
        engine.module.norm.weight.data.fill_(0.5)
    train(engine, 0, 1, 2)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    assert "modified in place" not in caplog.text


# ---- what fails before anything is written ---------------------------------------------------------------------------


class Unwilling:
    """What cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


class FailingElsewhere(Collectives):
    """A rank beside another one, on which something fails."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self.asked = what, list[str]()

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        self.asked.append(what)
        failed = FAILED + json.dumps([None, "StorageError: full", None]).encode()
        return [payload, failed if what == self._what else payload]


def test_a_client_state_that_cannot_be_pickled_is_an_error_that_all_ranks_hear_of(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = train(open_engine(build("gpt"), config(CPU, nvme_path)), 0)
    others = FailingElsewhere("nothing")
    put_exchange(engine, others)
    before = descriptors()
    with pytest.raises(ConfigError, match=r"client_state.*not me"):
        engine.save_checkpoint(tmp_path, client_state={"mine": Unwilling()})
    assert others.asked[-1] == "capturing what is saved"
    assert descriptors() == before and tags(tmp_path) == []


@pytest.mark.parametrize("what", ["making the folder of a checkpoint", "reserving the room of a checkpoint"])
def test_what_a_rank_has_opened_is_given_back_when_another_one_fails(
    open_engine: Open, nvme_path: Path, tmp_path: Path, what: str
) -> None:
    engine = train(open_engine(build("gpt"), config(CPU, nvme_path)), 0)
    before, alone = descriptors(), engine.collectives
    put_exchange(engine, FailingElsewhere(what))
    with pytest.raises(StateError, match=r"another rank.*full"):
        engine.save_checkpoint(tmp_path)
    assert descriptors() == before
    assert [name for name in Files().listing(tmp_path) if "partial" in name] == []
    put_exchange(engine, alone)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    others = FailingElsewhere("looking for a checkpoint")
    put_exchange(engine, others)
    with pytest.raises(StateError, match=r"another rank.*full"):
        engine.load_checkpoint(tmp_path)
    assert descriptors() == before and others.asked[-1] == "looking for a checkpoint"
    put_exchange(engine, alone)
