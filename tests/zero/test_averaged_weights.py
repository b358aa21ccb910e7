"""Averages of the weights: torch's bits beside every optimizer, wherever they are; and weights that become them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from models import build, make_config
from pairwise import in_pairs
from probe import drain_mover
from recovery import HELD, interrupted_in_hold
from reference import round_half_away
from safetensors.torch import load_file
from snapshot_runs import as_a_kill_would_leave_it
from tiled_optimizers import batch, differences, held_by, patchy, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero
from offload.errors import ConfigError, StateError, StorageError
from offload.io.aio import AioFault
from offload.memory.host_memory import trim_heap
from zero.utils import safe_set_full_fp32_param, safe_set_full_grad

STEPS, DECAY = 9, 0.9
TIERS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"))
NVME = ("nvme", "nvme")
Open = Callable[..., Any]

BLOCKS: dict[str, dict[str, Any]] = {
    "kernel": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "tiles": {"type": "AdamW", "params": {"lr": 0.01, "amsgrad": True}},
    "a kernel with a row": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "no states": {"type": "SGD", "params": {"lr": 0.05}},
    "whole parameters": {"type": "Lamb", "params": {"lr": 0.02}},
    "two rules": {"type": "Muon", "params": {"lr": 0.01}},
    "small states": {"type": "Adafactor", "params": {"lr": 0.02}},
}
FREE = {"type": "AdamWScheduleFree", "params": {"lr": 0.01, "betas": [0.8, 0.99], "warmup_steps": 3}}
KINDS = {"ema": {"optimizer": BLOCKS["kernel"], "ema_decay": DECAY}, "schedule-free": {"optimizer": FREE}}


def opened(open_engine: Open, folder: Path, pair: tuple[str, str], **more: Any) -> tuple[Any, nn.Module]:
    model = patchy()
    zero_keys = {"sub_group_size": 8192, **more.pop("zero", {})}
    return open_engine(model, make_config(pair, folder, zero=zero_keys, **more)), model


class Followed:
    """torch's averages of an engine's masters, each of the updates of its own parameter."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine, self.names = engine, [name for name, _ in model.named_parameters()]
        self._masters = {name: nn.ParameterList([held]) for name, held in harness.masters(engine, self.names).items()}
        self._averages = {
            name: AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            for name, masters in self._masters.items()
        }
        self._counts = dict.fromkeys(self.names, 0)
        for name in self.names:
            self._averages[name].update_parameters(self._masters[name])  # begins at the weights

    def follow(self, step: int = 0) -> None:
        held = harness.masters(self._engine, self.names)
        for name in self.names:
            count = self._engine.full_state(name)["step"]
            self._masters[name][0].data = held[name]
            if count > self._counts[name]:
                self._averages[name].update_parameters(self._masters[name])
            self._counts[name] = count

    def held(self) -> dict[str, Tensor]:
        averages = {name: next(iter(self._averages[name].module.parameters())).detach() for name in self.names}
        return {f"{name}/ema": averages[name] for name in self.names if self._counts[name]}


@pytest.mark.broad
@in_pairs(
    pair=TIERS,
    kind=tuple(BLOCKS),
    bf16=(False, True),
    clipping=(0.0, 0.05),
    threshold=(0, 100_000),
    accumulation=(1, 2),
)
def test_the_average_is_torchs_and_nothing_else_changes(
    open_engine: Open,
    nvme_path: Path,
    pair: tuple[str, str],
    kind: str,
    bf16: bool,
    clipping: float,
    threshold: int,
    accumulation: int,
) -> None:
    keys = {"optimizer": BLOCKS[kind], "bf16": bf16, "clipping": clipping, "accumulation": accumulation}
    zero_keys = {"stage3_param_persistence_threshold": threshold}
    without, model = opened(open_engine, nvme_path, pair, zero=zero_keys, **keys)
    followed = Followed(without, model)
    train(without, 0, accumulation * STEPS, bf16=bf16, after=followed.follow)
    engine, other = opened(open_engine, nvme_path, pair, zero=zero_keys, ema_decay=DECAY, **keys)
    train(engine, 0, accumulation * STEPS, bf16=bf16)
    assert differences(held_by(engine, other), held_by(without, model) | followed.held()) == []
    assert engine.full_state("inside.weight")["step"] == STEPS and followed.held().keys() >= {"branches.1.weight/ema"}


def test_skipped_steps_move_no_average(open_engine: Open, nvme_path: Path) -> None:
    """The loss scale begins too large; the averages of an fp16 model are of its masters."""
    keys = {"bf16": False, "fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1}}
    without = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, **keys))
    followed = Followed(without, without.module)
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, ema_decay=DECAY, **keys))
    for index in range(16):
        harness.train(without, index)
        followed.follow()
        harness.train(engine, index)
    assert 0 < engine.skipped_steps < 12
    states = {f"{name}/ema": engine.full_state(name)["ema"] for name in followed.names}
    assert differences(states, followed.held()) == []
    before = harness.masters(engine)
    with engine.averaged_weights():
        assert differences({f"{name}/ema": v for name, v in harness.masters(engine).items()}, followed.held()) == []
    assert differences(harness.masters(engine), before) == []


# ---- used in place of the weights -----------------------------------------------------------------------------------


def averages_in(held: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """By the name of the parameter; what has none is left out."""
    if kind == "ema":
        return {key.removesuffix("/ema"): value for key, value in held.items() if key.endswith("/ema")}
    part = 1 - 1 / FREE["params"]["betas"][0]  # type: ignore[index]
    named = {key.removesuffix("/z"): value for key, value in held.items() if key.endswith("/z")}
    return {name: torch.lerp(held[f"{name}/master"], z, part) for name, z in named.items()}


def loss_of(trainer: Any, bf16: bool) -> float:
    with torch.no_grad():
        return float(trainer(batch(50, bf16), 1))


@in_pairs(kind=tuple(KINDS), pair=TIERS, bf16=(False, True), threshold=(0, 100_000), accumulation=(1, 2))
def test_inside_the_weights_are_the_averages_and_afterwards_what_they_were(
    open_engine: Open,
    nvme_path: Path,
    tmp_path: Path,
    kind: str,
    pair: tuple[str, str],
    bf16: bool,
    threshold: int,
    accumulation: int,
) -> None:
    """Also while updates are due, and between two micro-batches; training goes on as if nobody had looked."""
    keys = {**KINDS[kind], "bf16": bf16, "accumulation": accumulation, "clipping": 0.05}
    zero_keys = {"stage3_param_persistence_threshold": threshold, "stage3_gather_16bit_weights_on_model_save": True}
    engine, model = opened(open_engine, nvme_path, pair, zero=zero_keys, **keys)
    plain, other = opened(open_engine, nvme_path, pair, zero=zero_keys, **keys)
    for trainer in (engine, plain):
        train(trainer, 0, 5, bf16=bf16)
    before = held_by(plain, other)
    expected = averages_in(before, kind)
    with engine.averaged_weights():
        with engine.averaged_weights():
            inside = held_by(engine, model)
        loss = loss_of(engine, bf16)
        engine.save_16bit_model(tmp_path)
        engine.save_fp32_model(tmp_path / "exact")
    assert expected and {name for name, _ in model.named_parameters()} > expected.keys()
    assert not torch.equal(inside["inside.weight/master"], before["inside.weight/master"])
    for name, parameter in (copied := patchy()).named_parameters():
        wanted = expected.get(name, before[f"{name}/master"])
        assert torch.equal(inside[f"{name}/master"], wanted), name
        parameter.data = round_half_away(wanted) if bf16 else wanted
    weights, exact = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "exact" / "model.safetensors")
    assert all(torch.equal(weights[name], parameter) for name, parameter in copied.named_parameters())
    assert all(torch.equal(exact[name], value) for name, value in expected.items())
    assert loss == loss_of(copied, bf16)
    assert differences(held_by(engine, model), before) == []
    for trainer in (engine, plain):
        train(trainer, 5, 10, bf16=bf16)
    assert differences(held_by(engine, model), held_by(plain, other)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_step_the_averages_are_the_weights(open_engine: Open, nvme_path: Path, kind: str) -> None:
    engine, model = opened(open_engine, nvme_path, NVME, **KINDS[kind])
    before = held_by(engine, model)
    with engine.averaged_weights():
        assert differences(held_by(engine, model), before) == []
    assert differences(held_by(engine, model), before) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_inside_brings_the_weights_back(open_engine: Open, nvme_path: Path, kind: str) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "cpu"), **KINDS[kind])
    train(engine, 0, 3, bf16=True)
    before = held_by(engine, model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.outside.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), engine.averaged_weights():
        loss_of(engine, True)
    handle.remove()
    assert differences(held_by(engine, model), before) == []
    train(engine, 3, 4, bf16=True)


def refused_inside(
    engine: Any, model: nn.Module, folder: Path, states: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(what errors name, what is not allowed inside)."""
    x = batch(0, True)

    def edit() -> None:
        with zero.GatheredParameters([model.gain]):
            model.gain.data.zero_()

    yield "backward", lambda: engine.backward(engine(x, 0))
    yield "backward", lambda: engine(x, 0).backward()
    yield "step", engine.step
    yield "optimizer.step", engine.optimizer.step
    yield "save_checkpoint", lambda: engine.save_checkpoint(folder)
    yield "load_checkpoint", lambda: engine.load_checkpoint(folder)
    yield "save_snapshot", engine.save_snapshot
    yield "load_snapshot", engine.load_snapshot
    yield "replan", engine.replan
    yield "optimizer.state_dict", engine.optimizer.state_dict
    yield "optimizer.load_state_dict", lambda: engine.optimizer.load_state_dict(states)
    yield "optimizer.state", lambda: engine.optimizer.state.__setitem__(model.gain, {})
    yield "an edit of values", lambda: safe_set_full_fp32_param(model.gain, torch.zeros(1))
    yield "an edit of values", lambda: safe_set_full_grad(model.gain, torch.zeros(1))
    yield "GatheredParameters: an edit of values", edit


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_from_the_trained_weights_is_refused_inside(
    open_engine: Open, nvme_path: Path, tmp_path: Path, kind: str
) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "cpu"), **KINDS[kind])
    train(engine, 0, 3, bf16=True)
    before, states = held_by(engine, model), engine.optimizer.state_dict()
    with engine.averaged_weights():
        for what, call in refused_inside(engine, model, tmp_path, states):
            with pytest.raises(StateError, match=rf"^{what}: inside engine\.averaged_weights\(\)"):
                call()
    assert differences(held_by(engine, model), before) == []
    train(engine, 3, 4, bf16=True)
    assert engine.global_steps == 4


def test_without_averages_and_inside_other_blocks_it_is_refused(open_engine: Open, nvme_path: Path) -> None:
    engine, _ = opened(open_engine, nvme_path, ("cpu", "cpu"), optimizer=BLOCKS["kernel"])
    with pytest.raises(StateError, match=r"no weights are averaged; set \"ema_decay\""), engine.averaged_weights():
        pass
    engine, model = opened(open_engine, nvme_path, ("cpu", "cpu"), **KINDS["ema"])
    inside = pytest.raises(StateError, match="inside forward, backward or GatheredParameters")
    with zero.GatheredParameters([model.gain]), inside, engine.averaged_weights():
        pass
    engine.close()
    with pytest.raises(StateError, match="averaged_weights: the engine is closed"), engine.averaged_weights():
        pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_put_aside_takes_four_bytes_an_element_and_only_inside(open_engine: Open, nvme_path: Path) -> None:
    """What is freed on the way is given back, too."""
    layers = 8
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers)))
    config = make_config(("cpu", "cpu"), nvme_path, optimizer=FREE, zero={"stage3_max_live_parameters": 10**9})
    engine = open_engine(model, config)
    engine.backward(engine(torch.ones(1, 2048, dtype=torch.bfloat16)).float().sum())
    engine.step()
    engine.synchronize()
    trim_heap()
    before, put_aside = resident_bytes(), 4 * layers * 2048 * 2048
    with engine.averaged_weights():
        inside = resident_bytes()
    assert put_aside // 2 < inside - before < 1.5 * put_aside
    assert resident_bytes() - before < put_aside // 2


def test_an_engine_may_be_closed_inside(open_engine: Open, nvme_path: Path) -> None:
    engine, _ = opened(open_engine, nvme_path, ("cpu", "cpu"), **KINDS["ema"])
    train(engine, 0, 1, bf16=True)
    with engine.averaged_weights():
        engine.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ema_decay": 1.0, "optimizer": BLOCKS["kernel"]}, r"ema_decay: expected less than 1"),
        ({"ema_decay": DECAY, "optimizer": FREE}, r"ema_decay: AdamWScheduleFree already averages the weights"),
        (
            {"ema_decay": DECAY, "zero": {"offload_optimizer": {"state_dtype": "8bit"}}},
            r"ema_decay: averages are kept in fp32, but .*state_dtype is 8bit",
        ),
        (
            {"ema_decay": DECAY, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            r"averages are made from fp32 master weights, and with bf16.bf16_master_weights_and_grads there are none",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    open_engine: Open, nvme_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(open_engine, nvme_path, ("cpu", "cpu"), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_go_along_when_the_model_changes(open_engine: Open, nvme_path: Path, kind: str) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path, **KINDS[kind]))
    harness.train(engine, 0, 1)
    with engine.averaged_weights():
        before = engine.full_master("head.weight")
        up = engine.full_master("blocks.0.up.weight")
    model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Linear(128, 128))
    with engine.averaged_weights():
        assert torch.equal(engine.full_master("head.weight"), before)
        assert torch.equal(engine.full_master("blocks.0.up.0.weight"), up)
        model.blocks[1].up = nn.Sequential(model.blocks[1].up, nn.Linear(128, 128))
        with pytest.raises(StateError, match=r"inside engine\.averaged_weights\(\)"):
            harness.losses_of(engine, 9)
    harness.train(engine, 2, 3)
    trained = engine.full_master("blocks.0.up.1.weight")
    with engine.averaged_weights():
        assert not torch.equal(engine.full_master("blocks.0.up.1.weight"), trained)
    assert torch.equal(engine.full_master("blocks.0.up.1.weight"), trained)


# ---- faults ---------------------------------------------------------------------------------------------------------


@in_pairs(kind=tuple(KINDS), operation=("read", "write"), when=("entering", "leaving"))
def test_a_disk_that_fails_on_the_way_loses_nothing(
    open_engine: Open, nvme_path: Path, kind: str, operation: str, when: str
) -> None:
    engine, model = opened(open_engine, nvme_path, NVME, **KINDS[kind])
    plain, other = opened(open_engine, nvme_path, ("cpu", "cpu"), **KINDS[kind])
    for trainer in (engine, plain):
        train(trainer, 0, 4, bf16=True)
    engine.synchronize()
    fault = AioFault(errno=errno.EIO, fail_rate=0.2, seed=3, ops=(operation,))
    if when == "entering":
        engine.inject(fault)
        with pytest.raises(StorageError), engine.averaged_weights():
            pytest.fail("the fault was never met")
        engine.inject(None)
    else:
        with pytest.raises(StorageError), engine.averaged_weights():
            engine.inject(fault)
        engine.inject(None)
        with pytest.raises(StateError, match="Leaving the block failed: enter and leave it once more"):
            engine.step()
    with engine.averaged_weights():
        pass
    assert differences(held_by(engine, model), held_by(plain, other)) == []
    for trainer in (engine, plain):
        train(trainer, 4, 7, bf16=True)
    assert differences(held_by(engine, model), held_by(plain, other)) == []


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@in_pairs(kind=tuple(KINDS), first=TIERS[:3], then=TIERS[:3])
def test_a_checkpoint_goes_on_bit_for_bit_with_its_averages(
    open_engine: Open, nvme_path: Path, tmp_path: Path, kind: str, first: tuple[str, str], then: tuple[str, str]
) -> None:
    engine, model = opened(open_engine, nvme_path, first, **KINDS[kind])
    train(engine, 0, 5, bf16=True)
    with engine.averaged_weights():
        shown = held_by(engine, model)
    engine.save_checkpoint(tmp_path)
    train(engine, 5, 9, bf16=True)
    resumed, other = opened(open_engine, nvme_path, then, **KINDS[kind])
    train(resumed, 7, 9, bf16=True)
    resumed.load_checkpoint(tmp_path)
    with resumed.averaged_weights():
        assert differences(held_by(resumed, other), shown) == []
    train(resumed, 5, 9, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []


@pytest.mark.parametrize("pair", [("cpu", "cpu"), NVME])
@pytest.mark.parametrize("kind", ["kernel", "no states"])
def test_averages_begin_at_the_weights_of_a_checkpoint_that_has_none(
    open_engine: Open,
    nvme_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pair: tuple[str, str],
    kind: str,
) -> None:
    without, model = opened(open_engine, nvme_path, ("cpu", "cpu"), optimizer=BLOCKS[kind])
    train(without, 0, 4, bf16=True)
    without.save_checkpoint(tmp_path)
    followed = Followed(without, model)
    followed.follow()  # the counts; a copy of the weights moves nothing
    engine, other = opened(open_engine, nvme_path, pair, optimizer=BLOCKS[kind], ema_decay=DECAY)
    train(engine, 8, 10, bf16=True)
    with caplog.at_level(logging.WARNING, "zero"):
        engine.load_checkpoint(tmp_path)
    assert ["no averages (ema) of 11 parameters" in record.getMessage() for record in caplog.records] == [True]
    train(without, 4, 8, bf16=True, after=followed.follow)
    train(engine, 4, 8, bf16=True)
    assert differences(held_by(engine, other), held_by(without, model) | followed.held()) == []
    # And back: who keeps none has no use for them.
    engine.save_checkpoint(tmp_path / "with")
    without.load_checkpoint(tmp_path / "with")
    train(without, 8, 9, bf16=True)
    train(engine, 8, 9, bf16=True)
    held = held_by(engine, other)
    assert differences(held_by(without, model), {k: v for k, v in held.items() if not k.endswith("/ema")}) == []


def test_torchs_form_of_the_states_goes_on_with_averages_and_without(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, NVME, bf16=False, **KINDS["ema"])
    train(engine, 0, 4, bf16=False)
    states, before = engine.optimizer.state_dict(), held_by(engine, model)
    assert all("ema" in state for state in states["state"].values())
    engine.optimizer.load_state_dict(states)
    assert differences(held_by(engine, model), before) == []
    for state in states["state"].values():
        del state["ema"]
    engine.optimizer.load_state_dict(states)
    with engine.averaged_weights():
        assert all(torch.equal(engine.full_master(name), before[f"{name}/master"]) for name in ("gain", "idle.bias"))
    followed = Followed(engine, model)
    followed.follow()
    train(engine, 4, 7, bf16=False, after=followed.follow)
    averages = {key: value for key, value in held_by(engine, model).items() if key.endswith("/ema")}
    assert differences(averages, followed.held()) == []


def test_states_of_an_optimizer_that_keeps_nothing_but_averages_go_into_it_and_into_one_without(
    open_engine: Open, nvme_path: Path
) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "cpu"), optimizer=BLOCKS["no states"], ema_decay=DECAY)
    without, _ = opened(open_engine, nvme_path, ("cpu", "cpu"), optimizer=BLOCKS["no states"])
    train(engine, 0, 3, bf16=True)
    states, before = engine.optimizer.state_dict(), held_by(engine, model)
    for state in states["state"].values():
        state["ema"] += 1
    engine.optimizer.load_state_dict(states)
    wanted = {key: value + 1 if key.endswith("/ema") else value for key, value in before.items()}
    assert differences(held_by(engine, model), wanted) == []
    without.optimizer.load_state_dict(states)
    assert without.full_state("gain")["step"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_goes_on_although_averages_were_shown_meanwhile(
    open_engine: Open, nvme_path: Path, tmp_path: Path, kind: str
) -> None:
    keys = {**KINDS[kind], "zero": {"offload_optimizer": {"snapshot": {"every": 2}}}}
    engine, model = opened(open_engine, nvme_path, NVME, **keys)
    for step in range(5):
        train(engine, step, step + 1, bf16=True)
        with engine.averaged_weights():
            elsewhere = as_a_kill_would_leave_it(nvme_path, tmp_path / f"killed-{step}")
    step = 4
    train(engine, 5, 8, bf16=True)
    resumed, other = opened(open_engine, elsewhere, NVME, **keys)
    step = resumed.load_snapshot()
    assert step in (3, 4, 5)
    train(resumed, step, 8, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []


def test_an_interrupt_of_the_exchange_leaves_the_trained_weights(open_engine: Open, nvme_path: Path) -> None:
    """The sub-group whose exchange runs at that moment is exchanged to its end, and back."""
    engine, model = opened(open_engine, nvme_path, NVME, **KINDS["ema"])
    train(engine, 0, 3, bf16=True)
    engine.synchronize()  # else the interrupt would end the wait for updates
    names = [name for name, _ in model.named_parameters()]
    before = harness.masters(engine, names)
    engine.inject(HELD)
    with interrupted_in_hold(engine), engine.averaged_weights():
        pass
    drain_mover(engine)  # what was left running ends now
    after = harness.masters(engine, names)
    assert [name for name in names if not torch.equal(before[name], after[name])] == []
