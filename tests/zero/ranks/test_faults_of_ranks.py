"""What goes wrong on one rank is known to all, soon; and nothing is left behind, also by engines that nobody closes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import micro_batch
from models import make_config, seeded
from probe import storage_of, swapped_range
from ranks import RankPool
from ranks_model import batch, motley
from ranks_runs import Place, Run, on_batch, opened, quiet
from torch import nn

import zero
from offload.errors import BudgetError
from offload.io.aio import AioFault

Pool = Callable[[int], RankPool]

SHARED, UNSHARED = Place(3, "nvme", "nvme"), Place(3, "nvme", "nvme", shared=False)
both = pytest.mark.parametrize("place", [SHARED, UNSHARED], ids=["shared", "not shared"])
SOON_SECONDS = 40.0


@pytest.fixture
def fresh(rank_pool: Pool) -> Iterator[RankPool]:
    """Two ranks whose group is of no use afterwards."""
    pool = rank_pool(2)
    yield pool
    pool.restart()


def told(job: Callable[[], None]) -> tuple[str, float]:
    """The error that `job` raises, in words, and after how long."""
    begin = time.monotonic()
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "no error", time.monotonic() - begin


# ---- errors -----------------------------------------------------------------------------------


def start_where_it_is_a_folder(place: Place, folders: list[str]) -> tuple[str, float]:
    kept: list[BaseException] = []  # whoever looks at the error keeps all that its frames hold

    def start() -> None:
        try:
            opened(place, folders[dist.get_rank()])
        except BaseException as error:
            kept.append(error)
            raise

    return told(start)


@both
def test_all_ranks_learn_that_one_could_not_initialize(fresh: RankPool, nvme_path: Path, place: Place) -> None:
    no_folder = nvme_path / "no_folder"
    no_folder.write_text("")
    first, second = fresh.run(start_where_it_is_a_folder, place, [str(no_folder), str(nvme_path)])
    assert "ConfigError" in first[0] and "no_folder" in first[0]
    assert "rank 0 has failed" in second[0] and "no_folder" in second[0]
    assert second[1] < SOON_SECONDS


def train_on_a_disk_that_fails(place: Place, nvme_path: str, op: str) -> tuple[str, float, str]:
    engine = opened(place, nvme_path)

    def train() -> None:
        for index in range(5):
            if index == 2 and dist.get_rank() == 0:
                engine.inject(AioFault(fail_rate=1.0, ops=(op,)))  # type: ignore[arg-type]
            micro_batch(engine, index, on_batch)

    error, seconds = told(train)
    engine.inject(None)
    closing, more_seconds = told(engine.close)
    return error, seconds + more_seconds, closing


@pytest.mark.parametrize("op", ["read", "write"])
@both
def test_all_ranks_end_soon_when_the_disk_of_one_fails(fresh: RankPool, nvme_path: Path, place: Place, op: str) -> None:
    answers = fresh.run(train_on_a_disk_that_fails, place, str(nvme_path), op)
    assert "StorageError" in answers[0][0]
    assert "rank 0" in answers[1][0]
    for _, seconds, closing in answers:
        assert closing == "no error"
        assert seconds < SOON_SECONDS
    assert [path for path in nvme_path.rglob("*") if path.is_file()] == []


def step_twice_after_a_failed_write(nvme_path: str) -> tuple[str, str, int, dict[str, torch.Tensor]]:
    """(where gradients are, what the first attempt of the second step says, steps and weights at the end)."""
    quiet()
    place, run = Place(1, "none", "nvme"), Run()
    with pytest.raises(BudgetError, match="at least") as refusal:
        zero.initialize(model=motley(), config=place.config(run, nvme_path, host_bytes=1000))
    least = int(re.findall(r"at least ([\d,]+)", str(refusal.value))[0].replace(",", ""))
    with zero.initialize(model=motley(), config=place.config(run, nvme_path, host_bytes=least))[0] as engine:
        micro_batch(engine, 0, on_batch)
        engine.backward(on_batch(engine, 1))
        if dist.get_rank() == 0:
            where = swapped_range(engine, "gradients")
            engine.inject(AioFault(fail_rate=1.0, count_max=1, ops=("write",), **where))
        error, _ = told(engine.step)
        if error != "no error":
            engine.step()
        micro_batch(engine, 2, on_batch)
        weights = {name: value.clone() for name, value in engine.named_full_parameters()}
        return str(set(engine.plan.gradient_tiers.values())), error, engine.global_steps, weights


def test_a_step_whose_gradient_one_rank_could_not_store_is_tried_again_by_all(fresh: RankPool, nvme_path: Path) -> None:
    """At stage 1 the gradients are reduced in it, and not a second time."""
    first, second = fresh.run(step_twice_after_a_failed_write, str(nvme_path))
    assert first[0] == "{'nvme'}" and first[1].startswith("StorageError: gradients of step 2: write of")
    assert second[1].startswith("StorageError") and "rank 0 has failed (StorageError: gradients of step 2" in second[1]
    assert first[2] == second[2] == 3
    assert all(torch.equal(value, second[3][name]) for name, value in first[3].items())


# ---- leaks ------------------------------------------------------------------------------------


def drop_engines(place: Place, nvme_path: str, count: int) -> list[tuple[int, int]]:
    """(descriptors, mappings of shared memory) after each engine that was dropped without `close`."""
    held = []
    for _ in range(count):
        engine = opened(place, nvme_path)
        micro_batch(engine, 0, on_batch)
        engine.synchronize()
        dist.barrier()
        del engine
        for _ in range(20):
            gc.collect()
            time.sleep(0.02)
        with open("/proc/self/maps", encoding="ascii") as maps:
            shared = sum("memfd:zero" in line for line in maps)
        held.append((len(os.listdir("/proc/self/fd")), shared))
        dist.barrier()
    return held


@both
def test_engines_that_are_dropped_leave_no_descriptor_and_no_shared_memory(
    rank_pool: Pool, nvme_path: Path, place: Place
) -> None:
    for held in rank_pool(2).run(drop_engines, place, str(nvme_path), 3):
        assert held[1] == held[2]
        assert held[2][1] == 0


def unannounced_accumulation(place: Place, nvme_path: str) -> list[int]:
    """Regions of memory after each step of two backwards, which the configuration knows nothing of."""
    held = []
    with opened(place, nvme_path, bf16=True) as engine:
        for step in range(4):
            with engine.no_sync():
                engine.backward(engine(batch(2 * step, dist.get_rank(), agreed=True)))
            micro_batch(engine, 2 * step + 1, on_batch)
            held.append(len(storage_of(engine).memory_pools))
    return held


def test_backwards_that_nobody_has_announced_take_memory_once(rank_pool: Pool, nvme_path: Path) -> None:
    for held in rank_pool(2).run(unannounced_accumulation, Place(1, "none", "cpu"), str(nvme_path)):
        assert held[1:] == held[:-1]


# ---- edits ------------------------------------------------------------------------------------


def edit_on(place: Place, nvme_path: str, editor: int, modifier_rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What forward sees, and what is stored, after `editor` alone has edited."""
    import zero

    quiet()
    with seeded(3):
        model = nn.Linear(8, 8, bias=False)
    config = make_config(("none", "cpu"), nvme_path, bf16=False, zero={"stage": place.stage})
    del config["zero_optimization"]["offload_param"]
    config["zero_optimization"]["shared_host_memory"] = place.shared
    with zero.initialize(model=model, config=config)[0] as engine:
        try:
            with zero.GatheredParameters([model.weight], modifier_rank=modifier_rank), torch.no_grad():
                if dist.get_rank() == editor:
                    model.weight.fill_(7.0)
        except Exception as error:
            if modifier_rank is not None or "edited" not in str(error):
                raise
        return engine(torch.eye(8)).detach().t(), engine.full_parameter("weight")


@pytest.mark.parametrize("modifier_rank", [0, None])
@pytest.mark.parametrize("shared", [True, False])
def test_edits_that_do_not_count_are_seen_by_no_rank(
    rank_pool: Pool, nvme_path: Path, shared: bool, modifier_rank: int | None
) -> None:
    with seeded(3):
        initial = nn.Linear(8, 8, bias=False).weight.detach()
    for seen, stored in rank_pool(2).run(edit_on, Place(1, shared=shared), str(nvme_path), 1, modifier_rank):
        assert torch.equal(seen, initial)
        assert torch.equal(stored, initial)


# ---- a backward that one rank alone breaks off ----------------------------------------------------------------


def stumble(place: Place, folder: str, bare: bool) -> tuple[str, int, list[float]]:
    """The error of the step behind it; then steps taken, and what the weights add up to."""

    count = itertools.count()

    def fail(gradient: torch.Tensor) -> None:
        if next(count) == 3:
            raise ValueError("on purpose")

    engine = opened(place, folder)
    try:
        loss = on_batch(engine, 0)
        trained = [p for p in engine.module.parameters() if p.requires_grad and dist.get_rank() == 0]
        handles = [p.register_hook(fail) for p in trained]
        with contextlib.suppress(ValueError):
            loss.backward() if bare else engine.backward(loss)
        for handle in handles:
            handle.remove()
        said, _ = told(engine.step)
        engine.zero_grad()
        for index in (1, 2):
            engine.backward(on_batch(engine, index))
            engine.step()
        return said, engine.global_steps, [float(value.double().sum()) for _, value in engine.named_full_parameters()]
    finally:
        engine.close()


@pytest.mark.parametrize("bare", [True, False], ids=["loss.backward", "engine.backward"])
def test_a_backward_that_one_rank_breaks_off_is_no_step_of_any(rank_pool: Pool, nvme_path: Path, bare: bool) -> None:
    first, second = rank_pool(2).run(stumble, SHARED, str(nvme_path), bare)
    assert first == second and first[1] == 2
    assert first[0].startswith("InterruptedBackward: step: the last backward was interrupted on rank 0")


def torn_batch(place: Place, folder: str) -> tuple[list[str], int]:
    """A backward by hand breaks off on rank 0; then everybody tries a step and a batch."""
    engine, count = opened(place, folder), itertools.count()

    def fail(gradient: torch.Tensor) -> None:
        if next(count) == 3:
            raise ValueError("on purpose")

    try:
        loss = on_batch(engine, 0)
        trained = [p for p in engine.module.parameters() if p.requires_grad and dist.get_rank() == 0]
        handles = [p.register_hook(fail) for p in trained]
        with contextlib.suppress(ValueError):
            engine.backward(loss)
        for handle in handles:
            handle.remove()
        said = [told(engine.step)[0].partition(":")[0]]
        said.append(
            told(lambda: engine.train_batch(iter([1]), lambda index: on_batch(engine, index)))[0].partition(":")[0]
        )
        engine.zero_grad()
        engine.backward(on_batch(engine, 2))
        engine.step()
        return said, engine.global_steps
    finally:
        engine.close()


def test_after_a_torn_backward_no_rank_begins_a_batch_alone(rank_pool: Pool, nvme_path: Path) -> None:
    first, second = rank_pool(2).run(torn_batch, SHARED, str(nvme_path), timeout_seconds=120.0)
    assert first == second == (["InterruptedBackward", "InterruptedBackward"], 1)


def fork_and_close(place: Place, folder: str) -> int:
    """A child of rank 1 closes the engine that it has inherited, as `with` or `atexit` would."""
    engine = opened(place, folder)
    try:
        if dist.get_rank() == 1:
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    engine.close()
                    status = 0
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
        for index in range(2):
            engine.backward(on_batch(engine, index))
            engine.step()
        return int(engine.global_steps)
    finally:
        engine.close()


def test_a_forked_child_that_closes_the_engine_leaves_the_ranks_alone(rank_pool: Pool, nvme_path: Path) -> None:
    assert rank_pool(2).run(fork_and_close, SHARED, str(nvme_path), timeout_seconds=120.0) == [2, 2]
