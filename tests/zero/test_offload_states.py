"""`engine.offload_states`: the device's memory goes, nothing else changes, and what is needed comes back by itself."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from hypothesis import given, settings
from hypothesis import strategies as st
from lagging import lagging_device
from models import build, make_config, tokens, trainability
from probe import device_memories, storage_of
from reference import differences, snapshot
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offload.memory.pool
import zero
from offload.errors import BudgetError, ConfigError, StateError
from offload.memory.pool import LinearPool
from zero.assembly.device_memory import (
    ALL,
    NEEDED_BY_FORWARD,
    OPTIMIZER_STATES,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)

Open = Callable[..., Any]
Pool = Callable[[int], Any]
KINDS = tuple(OffloadStateTypeEnum)
NAMES = trainability(build("gpt"))
stages = pytest.mark.parametrize("stage", (0, 1, 2, 3))


def config_of(stage: int, nvme_path: Any = "", *, states: str = "none", accumulation: int = 2, **more: Any) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, **more.pop("zero", {})}
    return make_config(("none", states), nvme_path, accumulation=accumulation, clipping=1.0, zero=zero, **more)


def held(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = snapshot(engine, NAMES)
    return found


def device_memory(engine: Any) -> list[StorageWeakRef]:
    """All that the engine has allocated for its device."""
    return [StorageWeakRef(memory.untyped_storage()) for memory in device_memories(engine)]


# ---- nothing changes --------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("offload"), st.one_of(st.none(), st.sets(st.sampled_from(KINDS)))),
    st.tuples(st.sampled_from(["reload", "train", "train", "look", "eval", "read", "zero_grad", "save", "load"])),
)


class Session:
    """One engine and what is done with it; `moves` says whether states are offloaded too."""

    def __init__(self, config: Any, folder: Path, *, moves: bool) -> None:
        self.engine = zero.initialize(model=build("gpt"), config=config)[0]
        self.folder, self.moves, self.count, self.saved = folder / str(moves), moves, 0, False
        self.seen: list[torch.Tensor] = []

    def act(self, action: tuple[Any, ...]) -> None:
        name, engine = action[0], self.engine
        if name == "offload" and self.moves:
            engine.offload_states(action[1])
            assert engine.offloaded_states >= NEEDED_BY_FORWARD & (ALL if action[1] is None else action[1])
        elif name == "reload" and self.moves:
            engine.reload_states()
            assert not engine.offloaded_states
        elif name == "train":
            loss = engine(tokens(self.count))
            engine.backward(loss)
            engine.step()
            self.seen.append(loss.detach())
            self.count += 1
        elif name == "eval":
            away = engine.offloaded_states
            with torch.no_grad():
                self.seen.append(engine(tokens(99)))
            assert engine.offloaded_states == away - NEEDED_BY_FORWARD
        elif name == "look":
            self.seen.append(engine.module.norm.weight.detach().clone())
        elif name == "read":
            self.seen.append(engine.full_master("blocks.1.up.weight"))
        elif name == "zero_grad":
            engine.zero_grad()
        elif name == "save":
            engine.save_checkpoint(self.folder, tag="t")
            self.saved = True
        elif name == "load" and self.saved:
            engine.load_checkpoint(self.folder, tag="t")

    def end(self) -> dict[str, Any]:
        with self.engine:
            return held(self.engine)


@pytest.mark.parametrize(("stage", "states", "bf16"), [(0, "none", True), (2, "cpu", False), (3, "none", True)])
@settings(max_examples=8)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=14))
def test_training_gives_the_same_bits_however_states_come_and_go(
    stage: int, states: str, bf16: bool, actions: list[tuple[Any, ...]]
) -> None:
    config = config_of(stage, states=states, bf16=bf16)
    with tempfile.TemporaryDirectory() as folder:
        plain, moving = (Session(config, Path(folder), moves=moves) for moves in (False, True))
        try:
            for action in [("train",), *actions, ("train",), ("train",)]:
                plain.act(action)
                moving.act(action)
            assert not differences(moving.end(), plain.end())
        finally:
            plain.engine.close()
            moving.engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moving.seen, plain.seen, strict=True))


@pytest.mark.parametrize("raw", (False, True), ids=("engine.backward", "loss.backward"))
@stages
def test_a_graph_that_was_made_before_can_be_walked_after(open_engine: Open, stage: int, raw: bool) -> None:
    plain, moving = (open_engine(build("gpt"), config_of(stage, accumulation=1)) for _ in range(2))
    for engine in (plain, moving):
        loss = engine(tokens(0))
        if engine is moving:
            engine.offload_states()
        loss.backward() if raw else engine.backward(loss)
        assert engine is plain or engine.offloaded_states == OPTIMIZER_STATES
        engine.step()
    assert not differences(held(moving), held(plain))


def test_a_device_whose_copies_lag_is_waited_for(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = held(train(open_engine(build("gpt"), config_of(3, accumulation=1)), *range(6)))
    with lagging_device(monkeypatch):
        engine = open_engine(build("gpt"), config_of(3, accumulation=1))
        for index in range(6):
            train(engine, index)
            engine.offload_states([KINDS[index % 5]] if index % 2 else None)
    assert not differences(held(engine), expected)


def test_a_model_that_changes_while_its_states_are_away_goes_on(open_engine: Open) -> None:
    losses = []
    for moves in (False, True):
        engine = train(open_engine(build("gpt"), config_of(3)), 0)
        if moves:
            engine.offload_states()
        torch.manual_seed(3)
        engine.module.head = nn.Sequential(nn.Linear(32, 32), engine.module.head)
        train(engine, 1, 2)
        losses.append(engine(tokens(3)).detach())
    assert torch.equal(*losses)


# ---- memory goes ------------------------------------------------------------------------------


@stages
def test_no_byte_of_the_device_stays_and_all_of_it_comes_back(open_engine: Open, stage: int) -> None:
    engine = train(open_engine(build("gpt"), config_of(stage)), 0, 1, 2)
    before, devices = device_memory(engine), {kind: engine.state_devices(kind) for kind in KINDS}
    count = len(before)
    for _ in range(3):
        engine.offload_states()
        gc.collect()
        assert count >= 3 and all(memory.expired() for memory in before)
        engine.reload_states()
        assert {kind: engine.state_devices(kind) for kind in KINDS} == devices
        before = device_memory(engine)
        assert len(before) == count


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_named_goes_and_what_is_not_named_stays(open_engine: Open, kind: OffloadStateTypeEnum) -> None:
    engine = train(open_engine(build("gpt"), config_of(3)), 0)
    storage = storage_of(engine)
    named = OPTIMIZER_STATES if kind in OPTIMIZER_STATES else frozenset([kind])
    planes = {
        KINDS[0]: storage.state_arrays,
        KINDS[2]: storage.weights,
        KINDS[3]: storage.gradients,
    }
    memory = {k: [home.memory.data_ptr() for plane in ps for home in plane.homes] for k, ps in planes.items()}
    engine.offload_states([kind.value])
    for k, ps in planes.items():
        moved = [home.memory.data_ptr() for plane in ps for home in plane.homes] != memory[k]
        assert moved == (k in named)
    assert engine.offloaded_states == named & engine.offloaded_states


def test_states_that_are_elsewhere_stay_and_it_is_said_once(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = train(open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path)), 0)
    with caplog.at_level(logging.INFO, "zero"):
        for _ in range(3):
            engine.offload_states([KINDS[0]])
    assert [r.message for r in caplog.records] == [
        "offload_states: nothing to do for hp_params, optim_states: they are not on cpu, or share its memory "
        "with others"
    ]
    assert not engine.offloaded_states
    train(engine, 1)


def test_what_comes_back_by_itself_is_said_with_the_reason(open_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    engine = train(open_engine(build("gpt"), config_of(2, accumulation=1)), 0)
    engine.offload_states()
    caplog.clear()
    with caplog.at_level(logging.INFO, "zero"):
        train(engine, 1)
    told = [record.message.split(" are back")[0] for record in caplog.records]
    assert told == [
        "forward needs what offload_states has moved away: lp_params",
        "backward needs what offload_states has moved away: lp_grads",
        "step needs what offload_states has moved away: hp_params, optim_states",
    ]


@stages
def test_a_parameter_whose_weights_are_away_keeps_its_face_and_is_never_garbage(open_engine: Open, stage: int) -> None:
    engine = train(open_engine(build("gpt"), config_of(stage)), 0, 1)
    small = engine.module.norm.weight  # below the persistence threshold: always there
    expected = small.detach().clone()
    engine.offload_states()
    assert (small.shape, small.dtype, small.device.type) == (expected.shape, expected.dtype, "cpu")
    assert engine.offloaded_states >= NEEDED_BY_FORWARD
    with torch._C.DisableTorchFunctionSubclass():  # past the face: the memory is not there, and says so
        assert small.isnan().all()
    assert torch.equal(small, expected)
    assert not engine.offloaded_states & NEEDED_BY_FORWARD


@stages
def test_a_module_that_is_called_by_itself_has_its_weights(open_engine: Open, stage: int) -> None:
    results = []
    for moves in (False, True):
        engine = train(open_engine(build("gpt"), config_of(stage)), 0, 1)
        if moves:
            engine.offload_states()
        with torch.no_grad():
            results.append(engine.module.blocks[1](torch.linspace(-1, 1, 256, dtype=torch.bfloat16).view(1, 8, 32)))
        assert not engine.offloaded_states & NEEDED_BY_FORWARD
    assert torch.equal(*results)


# ---- ends -------------------------------------------------------------------------------------


@stages
def test_an_engine_ends_while_its_states_are_away(open_engine: Open, stage: int, nvme_path: Path) -> None:
    from recovery import leaving_nothing

    expected = None
    for moves in (False, True):
        model = build("gpt")
        with leaving_nothing(nvme_path):
            engine = train(
                zero.initialize(model=model, config=config_of(stage, states="cpu" if stage else "none"))[0], 0, 1
            )
            if moves:
                engine.offload_states()
                away = engine.offloaded_states
            engine.destroy()
            del engine
        values = {name: p.detach().clone() for name, p in model.named_parameters()} if stage < 3 else {}
        assert expected is None or not differences(values, expected)
        expected = values
    assert away >= NEEDED_BY_FORWARD


def test_a_model_is_taken_back_from_an_engine_whose_states_are_away(open_engine: Open) -> None:
    model = build("gpt")
    plain = held(train(open_engine(build("gpt"), config_of(3)), 0, 1))
    first = train(open_engine(model, config_of(3)), 0, 1)
    first.offload_states()
    second = open_engine(model, config_of(1))
    with pytest.raises(StateError, match="closed"):
        first.reload_states()
    weights = {name: value for name, value in held(second).items() if name.endswith("weight") and "exp" not in name}
    assert weights and not differences(weights, {name: plain[name] for name in weights})


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["optim_state"]}, "include: expected .*optim_states.* got 'optim_state'"),
        ({"include": "optim_states"}, "include: expected a list of"),
        ({"include": OffloadStateTypeEnum.lp_grads}, "include: expected a list of"),
        ({"include": 3}, "include: expected a list of"),
        ({"device": "gpu"}, "device: expected cpu, got 'gpu'"),
        ({"device": "nvme"}, "host memory .*offload_param"),
        ({"device": OffloadDeviceEnum.nvme}, "host memory .*offload_param"),
    ],
)
def test_what_cannot_be_is_named(open_engine: Open, arguments: dict[str, Any], message: str) -> None:
    engine = open_engine(build("gpt"), config_of(3))
    with pytest.raises(ConfigError, match=message):
        engine.offload_states(**arguments)
    assert not engine.offloaded_states


def test_amid_the_use_of_weights_it_is_refused(open_engine: Open) -> None:
    engine = train(open_engine(build("gpt"), config_of(3)), 0, 1)
    with zero.GatheredParameters([engine.module.head.weight]), pytest.raises(StateError, match="inside forward"):
        engine.offload_states()
    handle = engine.module.norm.register_forward_hook(lambda *given: engine.offload_states())
    with pytest.raises(StateError, match="inside forward"):
        engine(tokens(0))
    handle.remove()
    assert not engine.offloaded_states
    train(engine, 2, 3)


def test_a_device_or_host_without_room_loses_nothing(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = held(train(open_engine(build("gpt"), config_of(3)), *range(4)))
    engine = train(open_engine(build("gpt"), config_of(3)), 0, 1)
    with monkeypatch.context() as patch:
        machine = zero.assembly.device_memory.read_machine(engine.device)
        patch.setattr("zero.assembly.device_memory.read_machine", lambda device: type(machine)(1, "test", None, 1, 1))
        with pytest.raises(BudgetError, match="of host memory are needed, 1 B are free"):
            engine.offload_states()
    assert not engine.offloaded_states
    engine.offload_states()
    allocate, left = offload.memory.pool._allocate, [1]

    def short(*given: Any, **more: Any) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return allocate(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(offload.memory.pool, "_allocate", short)
        with pytest.raises(BudgetError, match="do not fit on cpu any more"):
            engine.reload_states()
    assert engine.offloaded_states
    train(engine, 2, 3)
    assert not differences(held(engine), plain)


def test_device_none_does_nothing(open_engine: Open) -> None:
    engine = train(open_engine(build("gpt"), config_of(3)), 0)
    engine.offload_states(device=OffloadDeviceEnum.none)
    assert not engine.offloaded_states


def test_the_optimizer_has_the_same_calls(open_engine: Open) -> None:
    engine = train(open_engine(build("gpt"), config_of(3)), 0)
    engine.optimizer.offload_states(include=["optim_states"], pin_memory=False, non_blocking=True)
    assert engine.optimizer.offloaded_states == engine.offloaded_states == OPTIMIZER_STATES
    engine.optimizer.reload_states(non_blocking=True)
    assert engine.optimizer.offloaded_states == set()


def test_the_names_that_users_import_are_deepspeeds_states() -> None:
    assert zero.OffloadStateTypeEnum is OffloadStateTypeEnum
    assert zero.OffloadDeviceEnum is OffloadDeviceEnum
    assert [kind.value for kind in KINDS] == [
        *("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
    ]


# ---- ranks ------------------------------------------------------------------------------------


def moved_on_ranks(stage: int, shared: bool) -> tuple[bool, int]:
    """Whether the bits are those without, and how many kinds went."""
    rank, ends, most = torch.distributed.get_rank(), [], 0
    for moves in (False, True):
        config = config_of(stage, zero={"shared_host_memory": shared})
        with zero.initialize(model=build("gpt"), config=config)[0] as engine:
            for index in range(6):
                engine.backward(engine(tokens(2 * index + rank)))
                if moves and index != 3:  # amid accumulation, and between steps
                    engine.offload_states()
                    most = max(most, len(engine.offloaded_states))
                engine.step()
            ends.append(held(engine))
    return not differences(*ends), most


@pytest.mark.parametrize("shared", (False, True))
@stages
def test_on_two_ranks_nothing_changes(rank_pool: Pool, stage: int, shared: bool) -> None:
    for same, most in rank_pool(2).run(moved_on_ranks, stage, shared):
        assert same and most >= (3 if not shared else 2)


@pytest.mark.parametrize("error", [BudgetError("no room"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_what_an_offload_that_ended_half_way_has_moved_comes_back_like_the_rest(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine, calm = (open_engine(build("gpt"), config_of(3)) for _ in range(2))
    train(engine, 0, 1)
    put_away, calls = LinearPool.move_to_host, []

    def second_fails(region: LinearPool, *, pinned: bool) -> Any:
        calls.append(region)
        if len(calls) == 2:
            raise error
        return put_away(region, pinned=pinned)

    monkeypatch.setattr(LinearPool, "move_to_host", second_fails)
    with pytest.raises(type(error)):
        engine.offload_states()
    assert calls[0].is_on_host and engine.offloaded_states
    train(engine, 2, 3)
    assert not any(region.is_on_host for region in storage_of(engine).memory_pools)
    assert not engine.offloaded_states
    assert differences(held(engine), held(train(calm, 0, 1, 2, 3))) == []
