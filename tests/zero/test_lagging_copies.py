"""Copies to and from a device are never waited for too little: a device whose copies lag trains to the same bits.

The paths are those of a GPU; see `lagging.py`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lagging import LaggingStreams, lagging_device
from models import build, make_config, tokens, trainability
from pairwise import in_pairs
from probe import mover_of
from reference import differences, snapshot
from torch import Tensor

import zero
from offload.errors import BudgetError
from offload.kernels import kernels

Open = Callable[..., Any]
DEVICES = ("none", "cpu", "nvme")
STEPS = 4


def run_loop(engine: Any, *, backwards: int = 1, steps: int = STEPS) -> None:
    index = 0
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            for _ in range(backwards):
                engine.backward(engine(tokens(index)))
                index += 1
            engine.step()


def held(engine: Any, names: Any) -> dict[str, Any]:
    found: dict[str, Any] = snapshot(engine, names)
    return found


def assert_same(
    open_engine: Open,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    use: Callable[[Any], None],
    *,
    model: str = "gpt",
    eager: bool = True,
) -> list[LaggingStreams]:
    """`use` an engine on the CPU and one with a lagging device; both hold the same values then."""
    names = trainability(build(model))
    plain = open_engine(build(model), config)
    use(plain)
    expected = held(plain, names)
    with lagging_device(monkeypatch, eager=eager) as made:
        engine = open_engine(build(model), config)
        use(engine)
        assert differences(held(engine, names), expected) == []
        assert engine.get_global_grad_norm() == plain.get_global_grad_norm()
        engine.close()
    (streams,) = made
    assert streams.incoming.given == streams.incoming.done and streams.outgoing.given == streams.outgoing.done
    return made


@in_pairs(params=DEVICES, states=DEVICES, when=("in the step", "behind it"))
def test_every_pair_of_tiers_trains_to_the_same_bits(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, params: str, states: str, when: str
) -> None:
    pair, eager = (params, states), when == "in the step"
    config = make_config(pair, nvme_path, clipping=0.1)
    (streams,) = assert_same(open_engine, monkeypatch, config, run_loop, eager=eager)
    assert streams.incoming.given > 0 and streams.outgoing.given > 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in each unit, so that the memory of one serves for another of the same unit."""
    monkeypatch.setattr("zero.optim.contributions.CHUNK_NUMEL", 4096)
    monkeypatch.setattr("offload.array.copies.DEVICE_CHUNK_BYTES", 6 * 4096)
    monkeypatch.setattr("zero.optim.contributions.WIDE_CHUNK_NUMEL", 4096)


@pytest.mark.usefixtures("small_chunks")
@in_pairs(accumulation=(1, 3), backwards=(1, 2), pair=(("cpu", "cpu"), ("nvme", "nvme")))
def test_gradients_are_added_up_on_the_host(
    open_engine: Open,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    backwards: int,
    accumulation: int,
) -> None:
    """Announced or not: widened on the device or on the host."""
    config = make_config(pair, nvme_path, accumulation=accumulation, clipping=0.1)
    assert_same(open_engine, monkeypatch, config, lambda engine: run_loop(engine, backwards=backwards), eager=False)


@pytest.mark.parametrize("model", ["tied", "lora", "mixed", "odd_sizes", "reused"])
def test_models_of_every_structure_agree(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    config = make_config(("nvme", "nvme"), nvme_path, clipping=0.1)
    assert_same(open_engine, monkeypatch, config, run_loop, model=model)


@pytest.mark.usefixtures("small_chunks")
@in_pairs(more_bytes=(0, 40_000, 80_000), backwards=(1, 2), accumulation=(1, 2))
def test_gradients_go_to_the_disk_when_memory_is_short(
    open_engine: Open,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accumulation: int,
    backwards: int,
    more_bytes: int,
) -> None:
    """With room for none of them, for some, and for most."""

    def config(host_bytes: int) -> dict[str, Any]:
        budget = {"memory_budget": {"host": host_bytes}}
        return make_config(("nvme", "nvme"), nvme_path, accumulation=accumulation, clipping=0.1, **budget)

    with lagging_device(monkeypatch), pytest.raises(BudgetError, match="needs at least") as refused:
        zero.initialize(model=build("gpt"), config=config(1))
    found = re.search(r"needs at least ([\d,]+)", str(refused.value))
    assert found is not None
    host_bytes = int(found[1].replace(",", "")) + more_bytes
    spilled: list[str] = []

    def use(engine: Any) -> None:
        run_loop(engine, backwards=backwards)
        spilled.extend(tier for tier in engine.plan.gradient_tiers.values() if tier == "nvme")

    assert_same(open_engine, monkeypatch, config(host_bytes), use)
    assert spilled


@pytest.mark.parametrize("keys", [{"ratio": 0.5}, {"state_dtype": "bf16"}], ids=["ratio", "bf16 states"])
@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_states_on_both_sides_and_narrow_ones_agree(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], keys: dict[str, Any]
) -> None:
    config = make_config(pair, nvme_path, clipping=0.1, zero={"offload_optimizer": keys, "sub_group_size": 8192})
    assert_same(open_engine, monkeypatch, config, run_loop, eager=False)


@pytest.mark.parametrize("persistence", [0, 200])
def test_small_units_that_stay_on_the_device_are_current(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, persistence: int
) -> None:
    config = make_config(("cpu", "cpu"), nvme_path, zero={"stage3_param_persistence_threshold": persistence})
    assert_same(open_engine, monkeypatch, config, run_loop, eager=False)


def test_what_is_edited_and_what_is_dropped_agree(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[Tensor] = []

    def use(engine: Any) -> None:
        run_loop(engine, steps=2)
        engine.backward(engine(tokens(20)))
        engine.zero_grad()
        with torch.no_grad():
            losses.append(engine(tokens(21)).clone())
            with zero.GatheredParameters([engine.module.head.weight]):
                engine.module.head.weight.mul_(0.5)
            losses.append(engine(tokens(21)).clone())
        run_loop(engine, steps=2)

    for pair in (("cpu", "cpu"), ("nvme", "nvme")):
        assert_same(open_engine, monkeypatch, make_config(pair, nvme_path), use, eager=False)
        assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
        losses.clear()


@pytest.mark.parametrize("pair", [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_updates_beside_a_device_take_all_threads_and_leave_the_mover_free(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    """While a kernel runs the mover answers: on its own thread it could not."""
    seen: list[tuple[str, int]] = []
    engines: list[Any] = []
    update = kernels.adamw

    def watched(*given: Any, threads: int, **more: Any) -> None:
        async def answer() -> None:
            return

        mover_of(engines[0]).submit("a question", answer()).result()
        seen.append((threading.current_thread().name, threads))
        update(*given, threads=threads, **more)

    monkeypatch.setattr(kernels, "adamw", watched)
    monkeypatch.setattr("zero.assembly.engine_parts.kernel_threads", lambda on_cpu: 7)
    monkeypatch.setattr("zero.assembly.engine_parts.update_threads", lambda numel, limit: limit)
    with lagging_device(monkeypatch, eager=False):
        engine = open_engine(build("gpt"), make_config(pair, nvme_path))
        engines.append(engine)
        run_loop(engine)
        engine.synchronize()
        engine.close()
    names, threads = zip(*seen, strict=True)
    assert len(seen) >= STEPS and all(name.startswith("zero-host-kernels") for name in names)
    assert set(threads) == {7}


def test_what_the_host_updates_where_it_is_is_not_page_locked(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, sums and the chunks in flight travel to and from the device; states do not."""
    locked: list[int] = []

    def pin(data: Tensor) -> Callable[[], None]:
        locked.append(data.numel())
        return lambda: None

    monkeypatch.setattr("offload.memory.pool.pin", pin)
    monkeypatch.setattr("zero.store.storage.is_accelerator", lambda device: True)
    with lagging_device(monkeypatch):
        engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path))
        run_loop(engine)
        rows = {row.array: row.nbytes for row in engine.plan.rows if row.tier == "host"}
        pool, states = rows.pop("pool: states and chunks in flight"), rows.pop("optimizer states")
        assert states > 0 and sorted(set(locked) - {pool}) == sorted(set(rows.values()))
        engine.close()
