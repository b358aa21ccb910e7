"""The loss scale is what DeepSpeed documents, step by step, and a step that overflows leaves no trace but that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HYPER, unequal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import BATCH, build, make_config, tokens, trainability
from pairwise import in_pairs
from reference import LossScaleRule, Reference, differences, snapshot

import zero
from offload.errors import ConfigError, StateError
from zero.config import load_config
from zero.optim.loss_scale import LossScaleError, LossScaler, make_scaler

Open = Callable[..., Any]
TIERS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme"), ("nvme", "cpu"))
CPU = torch.device("cpu")
DRAWN = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

rules = st.fixed_dictionaries(
    {
        "loss_scale_window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "initial_scale_power": st.integers(3, 12),
        "min_loss_scale": st.sampled_from([1, 2, 8]),
    }
)
fates = st.sampled_from(["fine", "inf", "nan"])


def rule_of(keys: dict[str, Any]) -> LossScaleRule:
    return LossScaleRule(
        2.0 ** keys["initial_scale_power"],
        keys["loss_scale_window"],
        keys["hysteresis"],
        keys["consecutive_hysteresis"],
        keys["min_loss_scale"],
    )


def fp16_config(pair: tuple[str, str], nvme_path: Any, keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**make_config(pair, nvme_path, bf16=False, **more), "fp16": {"enabled": True, **keys}}


def one_step(trainer: Any, index: int, fate: str = "fine") -> None:
    """A micro-batch; `fate` says what becomes of its loss."""
    factor = {"fine": 1.0, "inf": float("inf"), "nan": float("nan")}[fate]
    trainer.backward(trainer(tokens(index)) * factor)
    trainer.step()


def reference_of(engine: Any, rule: LossScaleRule, **more: Any) -> Reference:
    return Reference(build("gpt"), lambda name: HYPER, fp16=True, rule=rule, **more)


# ---- the rule alone ---------------------------------------------------------------------------


@settings(max_examples=300)
@given(rules, st.lists(st.booleans(), max_size=60))
def test_the_scale_follows_the_documented_rule(keys: dict[str, Any], overflows: list[bool]) -> None:
    scaler = make_scaler(load_config({"fp16": {"enabled": True, **keys}}), CPU)
    rule = rule_of(keys)
    for overflow in overflows:
        if overflow and scaler.is_at_minimum:
            with pytest.raises(ArithmeticError):
                rule.update(overflow=True)
            return
        scaler.update_scale(overflow=overflow)
        rule.update(overflow=overflow)
        assert scaler.cur_scale == rule.scale
        assert scaler.cur_hysteresis == rule.left


@settings(max_examples=200)
@given(rules, st.lists(st.booleans(), max_size=60))
def test_without_hysteresis_it_is_the_rule_of_deepspeeds_stage_0(keys: dict[str, Any], overflows: list[bool]) -> None:
    """Which halves at each overflow, and doubles after a window that begins behind the first good step."""
    keys = {**keys, "hysteresis": 1}
    config = {"fp16": {"enabled": True, **keys}, "zero_optimization": {"stage": 0}}
    scaler = make_scaler(load_config(config), CPU)
    scale, last = 2.0 ** keys["initial_scale_power"], -1
    for index, overflow in enumerate(overflows):
        if overflow and scaler.is_at_minimum:
            return
        scaler.update_scale(overflow=overflow)
        if overflow:
            scale, last = max(scale / 2, keys["min_loss_scale"]), index
        elif index - last > 1 and (index - last - 1) % keys["loss_scale_window"] == 0:
            scale *= 2
        assert scaler.cur_scale == scale


@settings(max_examples=100)
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_under_autocast_the_scale_is_that_of_torchs_grad_scaler(window: int, overflows: list[bool]) -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=window)
    ours = LossScaler(
        2.0**16,
        dynamic=True,
        scale_window=window,
        skips_first_step=False,
        min_scale=2.0**-126,
        raise_error_at_min_scale=False,
    )
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        torchs.scale(torch.ones(1))
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        torchs.step(optimizer)
        torchs.update()
        ours.update_scale(overflow=overflow)
        assert ours.cur_scale == torchs.get_scale()


@settings(max_examples=100)
@given(rules, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_restored_scaler_goes_on_alike(keys: dict[str, Any], before: list[bool], after: list[bool]) -> None:
    config = load_config({"fp16": {"enabled": True, **keys}})
    one, other = make_scaler(config, CPU), make_scaler(config, CPU)
    for overflow in before:
        one.update_scale(overflow=overflow)
    other.load_state_dict(one.state_dict())
    for overflow in after:
        one.update_scale(overflow=overflow)
        other.update_scale(overflow=overflow)
        assert one.state_dict() == other.state_dict()


def test_a_static_scale_never_moves_and_none_is_needed_without_fp16() -> None:
    static = make_scaler(load_config({"fp16": {"enabled": True, "loss_scale": 128}}), CPU)
    for _ in range(5):
        assert not static.is_at_minimum
        static.update_scale(overflow=True)
        assert static.cur_scale == 128 and static.is_needed
    assert not make_scaler(load_config({"bf16": {"enabled": True}}), CPU).is_needed
    assert not make_scaler(load_config({"fp16": {"enabled": False, "loss_scale": 128}}), CPU).is_needed


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
def test_a_dynamic_scale_that_could_not_move_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"fp16.{key}: expected more than 0"):
        load_config({"fp16": {"enabled": True, key: 0}})
    load_config({"fp16": {"enabled": True, "loss_scale": 8, key: 0}})
    load_config({"fp16": {"enabled": False, key: 0}})


# ---- in an engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("pair", TIERS)
@settings(max_examples=6, **DRAWN)  # type: ignore[arg-type]
@given(keys=rules, drawn=st.lists(fates, min_size=4, max_size=12), clipping=st.sampled_from([0.0, 0.3]))
def test_on_every_tier_scale_weights_and_states_are_those_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[str, str],
    keys: dict[str, Any],
    drawn: list[str],
    clipping: float,
) -> None:
    config = fp16_config(pair, tmp_path_factory.mktemp("nvme"), keys, clipping=clipping)
    with zero.initialize(model=build("gpt"), config=config)[0] as engine:
        reference, skipped = reference_of(engine, rule_of(keys), clipping=clipping), 0
        for index, fate in enumerate(drawn):
            try:
                one_step(reference, index, fate)
            except ArithmeticError:
                with pytest.raises(LossScaleError, match="already at minimum"):
                    one_step(engine, index, fate)
                break
            one_step(engine, index, fate)
            skipped += reference.norms[-1] == float("inf")
            assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == reference.rule.scale  # type: ignore[union-attr]
            assert engine.get_global_grad_norm() == reference.norms[-1]
            assert (engine.skipped_steps, engine.global_steps) == (skipped, index + 1)
            assert engine.optimizer.overflow == (not engine.was_step_applied()) == (reference.norms[-1] == float("inf"))
        assert unequal(engine, reference) == []


@in_pairs(pair=TIERS[:3], accumulation=(1, 3), backwards=(1, 2), clipping=(0.0, 0.3), numel=(4096, 10**9))
def test_fp16_training_is_bit_equal_to_the_reference(
    open_engine: Open,
    nvme_path: Path,
    pair: tuple[str, str],
    accumulation: int,
    backwards: int,
    clipping: float,
    numel: int,
) -> None:
    keys = {"initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}
    more: dict[str, Any] = {"accumulation": accumulation, "clipping": clipping}
    config = fp16_config(pair, nvme_path, keys, zero={"sub_group_size": numel}, **more)
    engine = open_engine(build("gpt"), config)
    reference = reference_of(engine, LossScaleRule(2.0**20, 3, 1), **more)
    for trainer in (engine, reference):
        for index in range(8 * accumulation):
            for again in range(backwards):
                trainer.backward(trainer(tokens(backwards * index + again)))
            trainer.step()
    assert 0 < engine.skipped_steps < 8, "some steps were meant to overflow"
    assert engine.optimizer.cur_scale == reference.rule.scale  # type: ignore[union-attr]
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("pair", TIERS[:3])
def test_the_parameters_whose_gradients_overflow_are_named(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture, pair: tuple[str, str]
) -> None:
    """Also where several share a block of the counts."""
    model = build("gpt")
    parameters = dict(model.named_parameters())
    engine = open_engine(model, fp16_config(pair, nvme_path, {"loss_scale": 16}))
    for index, (name, parameter) in enumerate(parameters.items()):
        caplog.clear()
        hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
        with caplog.at_level(logging.WARNING, "zero"):
            one_step(engine, index)
        hook.remove()
        (line,) = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
        assert f"the gradients of {name} (first in backward) are inf or NaN" in line
        assert "the loss and" not in line


def test_a_loss_that_is_not_finite_is_told_of(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(build("gpt"), fp16_config(("cpu", "cpu"), nvme_path, {}))
    with caplog.at_level(logging.WARNING, "zero"):
        one_step(engine, 0, "nan")
    assert "step 1 is skipped: the loss and the gradients of head.weight, " in caplog.text
    assert "the loss scale stays 65536, overflows until it is halved: 1" in caplog.text


@pytest.mark.parametrize("pair", TIERS[:3])
def test_at_the_smallest_scale_the_run_stops_with_a_state_that_can_be_saved(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    config = fp16_config(pair, nvme_path, {"initial_scale_power": 1, "hysteresis": 1})
    engine, other = open_engine(build("gpt"), config), open_engine(build("gpt", seed=1), config)
    one_step(engine, 0)
    one_step(engine, 1, "inf")
    held, counted = snapshot(engine, trainability(build("gpt"))), (engine.global_steps, engine.skipped_steps)
    assert engine.optimizer.cur_scale == 1
    with pytest.raises(LossScaleError, match=r"step 3: the loss and the gradients of head.weight.*save_checkpoint"):
        one_step(engine, 2, "inf")
    assert (engine.global_steps, engine.skipped_steps) == counted and not engine.was_step_applied()
    engine.save_checkpoint(tmp_path / "saved")
    other.load_checkpoint(tmp_path / "saved")
    assert differences(snapshot(other, trainability(build("gpt"))), held) == []
    assert other.skipped_steps == 1 and other.optimizer.cur_scale == 1
    for index in (3, 4):
        one_step(engine, index)
        one_step(other, index)
    assert unequal(engine, other) == []


@in_pairs(pair=TIERS[:3], after=TIERS[:3])
def test_a_resumed_run_goes_on_with_the_same_scales_and_bits(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str], after: tuple[str, str]
) -> None:
    keys = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2}
    fate = ["fine", "inf", "fine", "fine", "nan", "inf", "fine", "fine", "inf", "fine"]
    engine = open_engine(build("gpt"), fp16_config(pair, nvme_path, keys))
    for index in range(5):
        one_step(engine, index, fate[index])
    engine.save_checkpoint(tmp_path / "saved")
    other = open_engine(build("gpt", seed=1), fp16_config(after, nvme_path, keys))
    other.load_checkpoint(tmp_path / "saved")
    for index in range(5, 10):
        one_step(engine, index, fate[index])
        one_step(other, index, fate[index])
        assert other.scaler.state_dict() == engine.scaler.state_dict()
    assert other.skipped_steps == engine.skipped_steps == 4
    assert unequal(engine, other) == []


def test_a_snapshot_brings_the_scale_back(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    keys = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}
    zero_keys = {"offload_optimizer": {"snapshot": {"every": 1}}}
    engine = open_engine(build("gpt"), fp16_config(("nvme", "nvme"), nvme_path, keys, zero=zero_keys))
    for index, fate in enumerate(["fine", "inf", "fine"]):
        one_step(engine, index, fate)
    engine.save_snapshot()
    state, held = engine.scaler.state_dict(), snapshot(engine, trainability(build("gpt")))
    engine.close()
    again = open_engine(build("gpt", seed=1), fp16_config(("nvme", "nvme"), nvme_path, keys, zero=zero_keys))
    assert again.load_snapshot() == 3
    assert again.scaler.state_dict() == state and again.skipped_steps == 1
    assert differences(snapshot(again, trainability(build("gpt"))), held) == []


def test_schedulers_are_not_stepped_where_the_step_is_skipped(open_engine: Open, nvme_path: Path) -> None:
    stepped: list[int] = []

    class Scheduler:
        def step(self) -> None:
            stepped.append(1)

    config = fp16_config(("cpu", "cpu"), nvme_path, {"initial_scale_power": 4})
    engine = open_engine(build("gpt"), config, lr_scheduler=Scheduler())
    for index, fate in enumerate(["fine", "inf", "nan", "fine"]):
        one_step(engine, index, fate)
    assert len(stepped) == 2 and engine.global_steps == 4


# ---- other ways to a backward -----------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_scaled_loss_gives_with_plain_backward_what_the_engine_gives(
    open_engine: Open, nvme_path: Path, accumulation: int
) -> None:
    config = fp16_config(("cpu", "cpu"), nvme_path, {"initial_scale_power": 8}, accumulation=accumulation)
    one, other = open_engine(build("gpt"), config), open_engine(build("gpt"), config)
    for index in range(2 * accumulation):
        one.backward(one(tokens(index)))
        other.scale(other(tokens(index))).backward()
        one.step()
        other.step()
    assert unequal(one, other) == []


def test_a_plain_backward_of_a_loss_that_is_not_scaled_is_refused_before_it_does_anything(
    open_engine: Open, nvme_path: Path
) -> None:
    config = fp16_config(("cpu", "cpu"), nvme_path, {"initial_scale_power": 8})
    engine, untouched = open_engine(build("gpt"), config), open_engine(build("gpt"), config)
    loss = engine(tokens(0))
    with pytest.raises(StateError, match=r"not scaled.*engine.backward\(loss\), or engine.scale\(loss\).backward\(\)"):
        loss.backward()
    for trainer in (engine, untouched):
        one_step(trainer, 1)
    assert unequal(engine, untouched) == []


def test_without_fp16_a_plain_backward_is_as_good(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path))
    loss = engine(tokens(0))
    assert engine.scale(loss) is loss
    loss.backward()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("wrong", [torch.ones(2, requires_grad=True) * 1, torch.ones(()), 1.0])
def test_only_a_scalar_with_a_graph_can_be_scaled(open_engine: Open, nvme_path: Path, wrong: Any) -> None:
    engine = open_engine(build("gpt"), fp16_config(("cpu", "cpu"), nvme_path, {}))
    with pytest.raises(StateError, match="scalar loss that requires a gradient"):
        engine.scale(wrong)


def test_between_boundaries_nothing_is_applied(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), fp16_config(("none", "none"), nvme_path, {"loss_scale": 64}, accumulation=2))
    applied = []
    for index in range(4):
        one_step(engine, index)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True] and engine.loss_scale() == 64
    assert engine.train_batch_size() == 2 * BATCH


def test_gradients_collected_with_one_scale_go_on_with_no_other(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def opened(**keys: Any) -> Any:
        return open_engine(build("gpt"), fp16_config(("cpu", "cpu"), nvme_path, keys, accumulation=2))

    engine = opened(initial_scale_power=8)
    for index in range(3):
        one_step(engine, index)
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"a loss scale of 256, but the loss scale is 64 now; .*the same fp16 block"):
        opened(loss_scale=64).load_checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigError, match="load_optimizer_states=True"):
        opened(initial_scale_power=6).load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    other = opened(initial_scale_power=6)
    other.load_checkpoint(tmp_path / "saved")
    for trainer in (engine, other):
        one_step(trainer, 3)
    assert unequal(engine, other) == []


def test_a_scale_set_by_hand_counts_from_the_next_loss(open_engine: Open, nvme_path: Path) -> None:
    one, other = (
        open_engine(build("gpt"), fp16_config(("cpu", "cpu"), nvme_path, keys))
        for keys in ({"initial_scale_power": 8}, {"loss_scale": 64})
    )
    one.optimizer.override_loss_scale(64)
    for trainer in (one, other):
        for index in range(3):
            one_step(trainer, index)
    assert unequal(one, other) == [] and not one.optimizer.dynamic_loss_scale
