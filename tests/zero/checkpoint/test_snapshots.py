"""A job that goes on from a snapshot gives the bits of one that was never cut off."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import micro_batch, reference_run, train, unequal, values
from models import build, tokens
from probe import snapshots_were_void
from recovery import least_host_bytes
from snapshot_runs import as_a_kill_would_leave_it, committed, config_of, folder, named_ranges, on_middle

import zero
from offload.array.two_slots import TwoSlotArray
from offload.errors import ConfigError, StateError, StorageError
from offload.io.aio import AioFault
from offload.kernels.block_checksums import BLOCK_BYTES

Open = Callable[..., Any]
PAIRS = [("nvme", "nvme"), ("cpu", "nvme"), ("none", "nvme")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("model", ["gpt", "mixed", "tied"])
@pytest.mark.parametrize("threshold", [0, 200])
def test_a_job_that_was_cut_off_goes_on_bit_for_bit(
    open_engine: Open, tmp_path: Path, nvme_path: Path, pair: tuple[str, str], model: str, threshold: int
) -> None:
    keys = {"stage3_param_persistence_threshold": threshold}
    first = train(open_engine(build(model), config_of(nvme_path, 2, pair, zero=keys)), *range(5))
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    second = open_engine(build(model, seed=9), config_of(later, 2, pair, zero=keys))
    assert second.load_snapshot() == 4 == second.global_steps
    train(second, 4, 5)
    train(first, 5)
    assert unequal(first, second, model) == []
    reference = reference_run(*range(6), model=model)
    assert unequal(second, reference, model) == []
    assert not snapshots_were_void(first), "nothing was void"


@pytest.mark.parametrize("cut", [4096, 10**9])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_cut_dtype_and_accumulation_goes_on(
    open_engine: Open, tmp_path: Path, nvme_path: Path, cut: int, bf16: bool, accumulation: int
) -> None:
    more = {"zero": {"sub_group_size": cut}, "bf16": bf16, "accumulation": accumulation}
    first = train(open_engine(build("gpt"), config_of(nvme_path, **more)), *range(3 * accumulation + 1))
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    second = open_engine(build("gpt", seed=9), config_of(later, **more))
    assert second.load_snapshot() == (3 if accumulation == 1 else 2)
    done = second.global_steps * accumulation
    assert second.micro_steps == done
    train(second, *range(done, 4 * accumulation))
    train(first, *range(3 * accumulation + 1, 4 * accumulation))
    assert unequal(first, second) == []


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_narrow_moments_go_on(open_engine: Open, tmp_path: Path, nvme_path: Path, state_dtype: str) -> None:
    def config(path: Path) -> dict[str, Any]:
        made = config_of(path, 2)
        made["zero_optimization"]["offload_optimizer"]["state_dtype"] = state_dtype
        return made

    first = train(open_engine(build("gpt"), config(nvme_path)), *range(4))
    second = open_engine(build("gpt", seed=9), config(as_a_kill_would_leave_it(nvme_path, tmp_path / "later")))
    assert second.load_snapshot() == 2
    train(second, 2, 3)
    assert unequal(first, second) == []


@pytest.mark.broad
def test_another_budget_finds_everything_again(open_engine: Open, tmp_path: Path, nvme_path: Path) -> None:
    """Where a byte lies in the files depends on its coordinates, not on what was cached."""
    base = config_of(nvme_path, zero={"sub_group_size": 4096})
    least = least_host_bytes(base, "middle")
    budgets = [{"host": least}, {"host": least + 3_000_000}, {"host": least + 30_000_000}, {}]
    path, seen = nvme_path, []
    (tmp_path / "plain").mkdir()
    plain = open_engine(build("middle"), _plain(tmp_path / "plain"))
    for step, budget in enumerate(budgets):
        config = {**config_of(path, zero={"sub_group_size": 4096}), "memory_budget": budget}
        engine = open_engine(build("middle", seed=step), config)
        assert engine.load_snapshot() == (step or None)
        seen.append(engine.plan.tier_bytes("host"))
        assert unequal(engine, plain, "middle") == []
        train(engine, step, loss_of=on_middle)
        train(plain, step, loss_of=on_middle)
        assert engine.save_snapshot() == step + 1
        path = as_a_kill_would_leave_it(path, tmp_path / f"later-{step}")
    assert len(set(seen)) > 2


def test_an_extra_state_that_cannot_be_kept_is_an_error_that_names_the_module(
    open_engine: Open, tmp_path: Path, nvme_path: Path
) -> None:
    class Closed(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return lambda: 0

    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), Closed(32, 8))
    engine = open_engine(model, config_of(nvme_path))
    engine.backward(engine(tokens(0)).square().mean())
    with pytest.raises(ConfigError, match=r"get_extra_state of a module returns \(1\) cannot be pickled"):
        engine.step()
        engine.save_snapshot()


def test_everything_beside_the_planes_goes_on(open_engine: Open, tmp_path: Path, nvme_path: Path) -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = build("gpt")
            self.drop = torch.nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def get_extra_state(self) -> Any:
            return self.calls

        def set_extra_state(self, state: Any) -> None:
            self.calls = state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.calls += 1
            return self.gpt(x) * (1 + self.drop(torch.ones(8)).mean()) + 0 * random.random() * np.random.rand()

    first = open_engine(Noisy(), config_of(nvme_path), lr_scheduler=scheduler)
    for index in range(2):
        first.optimizer.param_groups[0]["weight_decay"] = 0.1 * (index + 1)
        micro_batch(first, index)
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    first_draws = None
    micro_batch(first, 2)
    first_draws = torch.rand(3), random.random(), np.random.rand()
    names = [name for name, _ in first.module.named_parameters()]
    second = open_engine(Noisy(), config_of(later), lr_scheduler=scheduler)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert second.load_snapshot() == 1
    assert second.get_lr() == [1e-2 * 0.5]
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert second.get_global_grad_norm() > 0
    assert float(second.module.seen) == second.module.calls == 1
    second.optimizer.param_groups[0]["weight_decay"] = 0.2
    micro_batch(second, 1)
    micro_batch(second, 2)
    draws = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(draws[0], first_draws[0]) and draws[1:] == first_draws[1:]
    assert float(second.module.seen) == second.module.calls == 3
    for name in names:
        assert torch.equal(first.full_master(name), second.full_master(name)), name


def test_going_back_in_the_same_engine_repeats_what_came_after(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path, 3)), 0, 1, 2, 3)
    once = values(engine)
    assert engine.load_snapshot() == 3
    train(engine, 3)
    again = values(engine)
    assert all(torch.equal(once[key], again[key]) for key in once)


def test_numbers_of_numpy_in_param_groups_go_on(open_engine: Open, tmp_path: Path, nvme_path: Path) -> None:
    """A schedule made with numpy leaves them there."""
    first = open_engine(build("gpt"), config_of(nvme_path, 2))
    first.optimizer.param_groups[0]["lr"] = np.float64(0.003)
    train(first, 0, 1, 2)
    second = open_engine(build("gpt", seed=9), config_of(as_a_kill_would_leave_it(nvme_path, tmp_path / "later"), 2))
    assert second.load_snapshot() == 2
    assert second.optimizer.param_groups[0]["lr"] == 0.003
    train(second, 2)
    assert unequal(first, second) == []


def test_without_a_snapshot_nothing_is_loaded_and_nothing_changes(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path, 10)), 0)
    assert engine.load_snapshot() is None
    assert unequal(engine, reference_run(0)) == []


def test_a_snapshot_waits_for_the_next_step_and_close_does_not_forget_it(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path, 2)), 0, 1)
    assert committed(nvme_path) is None
    train(engine, 2)
    assert committed(nvme_path)["step"] == 2  # type: ignore[index]
    train(engine, 3)
    engine.close()
    assert committed(nvme_path)["step"] == 4  # type: ignore[index]


def test_an_engine_that_ends_by_an_error_commits_nothing_more(open_engine: Open, nvme_path: Path) -> None:
    with pytest.raises(KeyError), open_engine(build("gpt"), config_of(nvme_path)) as engine:
        train(engine, 0)
        raise KeyError
    assert os.listdir(nvme_path) == []


# ---- changes by other means -----------------------------------------------------------------------------------------


class Clamped(torch.nn.Module):
    """Changes a weight inside forward, so that doing it twice shows."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = build("gpt")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.gpt.head.weight.mul_(0.9)
        return self.gpt(x)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("threshold", [0, 10_000])
def test_a_model_that_changes_weights_in_forward_goes_on_bit_for_bit(
    open_engine: Open, tmp_path: Path, nvme_path: Path, pair: tuple[str, str], threshold: int
) -> None:
    keys = {"stage3_param_persistence_threshold": threshold}
    first = train(open_engine(Clamped(), config_of(nvme_path, pair=pair, zero=keys)), *range(5))
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    second = open_engine(Clamped(), config_of(later, pair=pair, zero=keys))
    loaded = second.load_snapshot()
    assert loaded is not None and loaded >= 3
    train(second, *range(loaded, 5))
    for name, _ in Clamped().named_parameters():
        assert torch.equal(first.full_master(name), second.full_master(name)), name


def test_an_edit_between_two_steps_is_in_the_next_snapshot_once(
    open_engine: Open, tmp_path: Path, nvme_path: Path
) -> None:
    def edit(engine: Any) -> None:
        with torch.no_grad(), zero.GatheredParameters([engine.module.head.weight]):
            engine.module.head.weight.mul_(0.5)

    first = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)
    assert committed(nvme_path)["step"] == 1  # type: ignore[index]
    edit(first)
    train(first, 2, 3)
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    second = open_engine(build("gpt", seed=9), config_of(later))
    assert second.load_snapshot() == 4, "committed inside its step"
    assert unequal(first, second) == []


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_step_over_a_snapshot_that_nobody_loaded_is_refused(open_engine: Open, nvme_path: Path) -> None:
    train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1).close()
    engine = open_engine(build("gpt"), config_of(nvme_path))
    engine.backward(engine(tokens(0)))
    with pytest.raises(StateError, match=r"snapshot 'default' of step 2.*load_snapshot.*zero snapshots rm"):
        engine.step()
    assert engine.load_snapshot() == 2
    train(engine, 2)


def test_another_model_is_refused_and_the_snapshot_stays(open_engine: Open, nvme_path: Path) -> None:
    train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1).close()
    with pytest.raises(ConfigError, match=r"step 2.*has another layout.*parameters: \d+ then, \d+ now"):
        open_engine(build("gpt", blocks=2), config_of(nvme_path))
    with pytest.raises(
        ConfigError, match=r"sub-groups: 7 of up to 16,384 elements then, 16 of up to 4,096 elements now"
    ):
        open_engine(build("gpt"), config_of(nvme_path, zero={"sub_group_size": 4096}))
    engine = open_engine(build("gpt"), config_of(nvme_path))
    assert engine.load_snapshot() == 2


def test_two_jobs_cannot_have_one_snapshot(open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.files.snapshot_files.LOCK_SECONDS", 0.1)
    first = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)
    with pytest.raises(ConfigError, match=r"'default' \(rank 0\) is in use by another job.*snapshot.name"):
        open_engine(build("gpt"), config_of(nvme_path))
    other = config_of(nvme_path)
    other["zero_optimization"]["offload_optimizer"]["snapshot"]["name"] = "other"
    train(open_engine(build("gpt"), other), 0)
    train(first, 2)
    assert unequal(first, reference_run(0, 1, 2)) == []


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"device": "cpu", "snapshot": {"every": 2}}, 'device "nvme", got "cpu"'),
        ({"snapshot": {"every": 0}}, "snapshot.every"),
        ({"snapshot": {"every": 1, "name": "../x"}}, "snapshot.name"),
    ],
)
def test_what_cannot_be_is_refused(open_engine: Open, nvme_path: Path, block: dict[str, Any], words: str) -> None:
    config = config_of(nvme_path)
    config["zero_optimization"]["offload_optimizer"].update(block)
    with pytest.raises(ConfigError, match=words):
        open_engine(build("gpt"), config)
    assert os.listdir(nvme_path) == []


def test_a_model_that_changes_later_is_refused(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path)), 0)
    engine.module.more = torch.nn.Linear(4, 4)
    with pytest.raises(StateError, match=r"the model has changed.*snapshot"):
        train(engine, 1)
    del engine.module.more
    train(engine, 1)
    assert unequal(engine, reference_run(0, 1)) == []


def test_a_save_amid_an_accumulation_is_refused(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path, accumulation=2)), 0)
    with pytest.raises(StateError, match="gradients have been accumulated"):
        engine.save_snapshot()
    train(engine, 1)
    assert engine.save_snapshot() == 1


def test_without_the_block_both_calls_say_how_to_ask(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), {**config_of(nvme_path)} | _plain(nvme_path))
    for call in (engine.save_snapshot, engine.load_snapshot):
        with pytest.raises(StateError, match=r"offload_optimizer\.snapshot"):
            call()


def _plain(nvme_path: Path) -> dict[str, Any]:
    config = config_of(nvme_path)
    del config["zero_optimization"]["offload_optimizer"]["snapshot"]
    return config


# ---- disks that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["sync", "write"])
def test_a_disk_that_fails_leaves_the_snapshot_before(
    open_engine: Open, tmp_path: Path, nvme_path: Path, operation: Any
) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path, pair=("cpu", "nvme"))), 0, 1)
    before = committed(nvme_path)
    engine.backward(engine(tokens(2)))
    engine.synchronize()
    engine.inject(AioFault(fail_rate=1.0, ops=(operation,)))
    with pytest.raises(StorageError):
        engine.step()
    assert committed(nvme_path) == before
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    engine.inject(None)
    engine.step()
    train(engine, 3)
    assert unequal(engine, reference_run(*range(4))) == []
    assert committed(nvme_path)["step"] == 3  # type: ignore[index]
    second = open_engine(build("gpt", seed=9), config_of(later, pair=("cpu", "nvme")))
    assert second.load_snapshot() == 1
    train(second, 1, 2, 3)
    assert unequal(engine, second) == []


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_after_a_sync_that_failed_all_that_it_was_to_cover_is_written_again(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    """The kernel drops pages that it could not write, and reports that once."""
    engine = train(open_engine(build("gpt"), config_of(nvme_path, pair=pair)), 0, 1)
    before = engine.statistics().nvme_write_bytes
    train(engine, 2)
    engine.save_snapshot()
    a_step = engine.statistics().nvme_write_bytes - before
    engine.backward(engine(tokens(3)))
    engine.step()
    engine.inject(AioFault(fail_rate=1.0, ops=("sync",)))
    for _ in range(2):
        with pytest.raises(StorageError):
            engine.save_snapshot()
    engine.inject(None)
    before = engine.statistics().nvme_write_bytes
    engine.save_snapshot()
    state = sum(row.nbytes for row in engine.plan.rows if row.array in ("weights", "optimizer states"))
    assert engine.statistics().nvme_write_bytes - before >= min(a_step, state) // 2
    assert committed(nvme_path)["step"] == 4  # type: ignore[index]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_after_a_damaged_snapshot_a_checkpoint_is_gone_on_from(
    open_engine: Open, tmp_path: Path, nvme_path: Path, pair: tuple[str, str]
) -> None:
    with train(open_engine(build("gpt"), config_of(nvme_path, 2, pair)), 0, 1) as first:
        first.save_checkpoint(tmp_path / "saves")
        first.save_snapshot()
        *_, (begin, _) = named_ranges(first, nvme_path)
    engine = open_engine(build("gpt", seed=9), config_of(nvme_path, 2, pair))
    _flip(folder(nvme_path) / "rank-0" / "swap", 8 * begin)
    with pytest.raises(StorageError, match="cannot be used"):
        engine.load_snapshot()
    engine.load_checkpoint(tmp_path / "saves")
    train(engine, 2, 3, 4)
    plain = reference_run(*range(5))
    assert unequal(engine, plain) == []
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    last = open_engine(build("gpt", seed=8), config_of(later, 2, pair))
    assert last.load_snapshot() == 4
    train(last, 4)
    assert unequal(last, plain) == []


def test_a_snapshot_that_is_damaged_is_told(open_engine: Open, nvme_path: Path) -> None:
    keys = {"stage3_param_persistence_threshold": 200}
    train(open_engine(build("gpt"), config_of(nvme_path, zero=keys)), 0, 1).close()
    rank = folder(nvme_path) / "rank-0"
    manifest, head = rank / f"manifest-{committed(nvme_path)['number'] % 2}", rank.parent / "committed"  # type: ignore[index]
    line = manifest.read_bytes().index(b"\n")
    for path, places in ((manifest, [100]), (manifest, [line + 1000]), (head, range(20, 16384, 4096))):
        data = bytearray(path.read_bytes())
        for place in places:
            data[place] ^= 1
        before = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(StorageError, match=f"checksum.*{path.name}"):
            open_engine(build("gpt"), config_of(nvme_path, zero=keys)).load_snapshot()
        path.write_bytes(before)
    assert open_engine(build("gpt"), config_of(nvme_path, zero=keys)).load_snapshot() == 2


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_flipped_bit_of_what_a_snapshot_names_is_noticed(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    """And none of what it does not name matters."""
    keys = {"stage3_param_persistence_threshold": 200}
    engine = train(open_engine(build("mixed"), config_of(nvme_path, pair=pair, zero=keys)), 0, 1, 2)
    engine.save_snapshot()
    before, swap = values(engine, "mixed"), folder(nvme_path) / "rank-0" / "swap"
    named, draw = list(named_ranges(engine, nvme_path)), random.Random(7)
    chosen = [draw.randrange(8 * begin, 8 * end) for begin, end in named for _ in range(200 // len(named) + 1)]
    names = [name for name, _ in engine.module.named_parameters()]
    for bit in [*chosen, 8 * named[0][0], 8 * named[-1][1] - 1]:
        with flipped(swap, bit), pytest.raises(StorageError, match="are damaged") as caught:
            engine.load_snapshot()
        text = str(caught.value)
        assert caught.value.path == str(swap) and 0 <= bit // 8 - (caught.value.offset or 0) < BLOCK_BYTES
        assert "load a checkpoint, or remove the snapshot" in text
        assert any(name in text for name in names)
    with pytest.raises(StateError, match="load_snapshot"):
        micro_batch(engine, 0)
    others = [byte for byte in range(0, swap.stat().st_size, 1999) if not any(lo <= byte < hi for lo, hi in named)]
    with contextlib.ExitStack() as stack:
        for byte in others:
            stack.enter_context(flipped(swap, 8 * byte))
        assert engine.load_snapshot() == 3
    assert others and all(torch.equal(value, before[key]) for key, value in values(engine, "mixed").items())


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    _flip(path, bit)
    try:
        yield
    finally:
        _flip(path, bit)


def _flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
        os.fsync(file.fileno())


def test_what_the_steps_write_is_not_read_again_for_its_checksums(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    complete = TwoSlotArray.complete_checksums

    async def counted(plane: TwoSlotArray) -> None:
        read.append(sum(end - begin for pair in plane.pairs for begin, end in pair.checksums.unknown_blocks()))
        await complete(plane)

    monkeypatch.setattr(TwoSlotArray, "complete_checksums", counted)
    train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1, 2, 3).close()
    assert len(read) >= 8 and not any(read)


def test_a_gradient_that_was_written_before_a_return_to_the_snapshot_is_forgotten(
    open_engine: Open, nvme_path: Path
) -> None:
    engine = train(open_engine(build("gpt"), config_of(nvme_path)), 0)
    assert engine.save_snapshot() == 1
    parameter = engine.module.head.weight
    parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    assert engine.load_snapshot() == 1
    train(engine, 1)
    assert unequal(engine, reference_run(0, 1)) == []
