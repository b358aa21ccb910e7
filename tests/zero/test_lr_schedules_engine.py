"""The scheduler that an engine steps: where it comes from, when it is stepped, what it drives, how it is resumed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, unequal
from models import ADAMW, build, make_config, tokens, trainability
from reference import Hyper, Reference, differences, snapshot
from torch.optim import lr_scheduler as torch_schedulers

from offload.errors import ConfigError
from zero import lr_schedules
from zero.config import load_config
from zero.lr_schedules import OneCycle, WarmupDecayLR, WarmupLR

Open = Callable[..., Any]
STEPS = 6
CONFIGURED: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": [1e-3, 2e-3], "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": [1e-2, 2e-2], "cycle_first_step_size": 2, "cycle_min_mom": 0.7},
    "WarmupLR": {"warmup_num_steps": 4.0},
    "WarmupDecayLR": {"warmup_num_steps": "2", "total_num_steps": 5, "warmup_max_lr": [1e-2, 3e-3]},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 5, "warmup_type": "linear"},
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 5},
    "OneCycleLR": {"max_lr": [1e-2, 2e-2], "total_steps": 8},
}


def in_two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Every other parameter with a learning rate of its own."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]


def plain_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(in_two_groups(model), **ADAMW)


def class_of(kind: str) -> Any:
    return getattr(lr_schedules, kind, None) or getattr(torch_schedulers, kind)


def numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """As a script would pass them; a configuration may write them as text and floats."""
    return {key: int(value) if key.endswith("_steps") else value for key, value in arguments.items()}


def scheduled_reference(engine: Any, kind: str) -> Reference:
    """Plain torch, with that schedule over the param groups of a plain optimizer."""
    model = build("gpt")
    plain = plain_adamw(model)
    group_of = {id(p): group for group in plain.param_groups for p in group["params"]}
    live = {name: group_of[id(p)] for name, p in model.named_parameters()}

    def hyper_of(name: str) -> Hyper:
        group = live[name]
        return Hyper(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])

    schedule = class_of(kind)(plain, **numbers(CONFIGURED[kind]))

    def stepped() -> None:
        plain._opt_called = True  # type: ignore[attr-defined]
        schedule.step()

    return Reference(model, hyper_of, on_step=stepped)


@pytest.mark.parametrize("pair", [("none", "none"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("kind", CONFIGURED)
def test_a_configured_scheduler_trains_to_the_bits_of_the_same_schedule_without_the_engine(
    open_engine: Open, nvme_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    model = build("gpt")
    names, groups = trainability(model), in_two_groups(model)
    scheduler = {"type": kind, "params": CONFIGURED[kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = open_engine(model, make_config(pair, nvme_path, scheduler=scheduler), model_parameters=groups)
        train(engine, *range(STEPS))
    assert type(engine.lr_scheduler) is class_of(kind)
    reference = scheduled_reference(engine, kind)
    train(reference, *range(STEPS))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "OneCycle", "StepLR"])
def test_a_configured_scheduler_drives_the_groups_of_an_optimizer_that_is_handed_over(
    open_engine: Open, nvme_path: Path, kind: str
) -> None:
    model = build("gpt")
    names, passed = trainability(model), plain_adamw(model)
    scheduler = {"type": kind, "params": CONFIGURED[kind]}
    engine = open_engine(
        model, make_config(("cpu", "cpu"), nvme_path, optimizer={}, scheduler=scheduler), optimizer=passed
    )
    train(engine, *range(STEPS))
    assert [group["lr"] for group in passed.param_groups] == engine.get_lr() == engine.lr_scheduler.get_last_lr()
    reference = scheduled_reference(engine, kind)
    train(reference, *range(STEPS))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_the_scheduler_is_stepped_once_an_optimizer_step_however_it_is_taken(
    open_engine: Open, nvme_path: Path
) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, accumulation=2, scheduler=scheduler))
    train(engine, *range(6))
    assert engine.lr_scheduler.last_batch_iteration == 2 and engine.global_steps == 3
    engine.backward(engine(tokens(6)))
    engine.optimizer.step()
    assert engine.lr_scheduler.last_batch_iteration == 3 and engine.global_steps == 4


def test_arguments_of_the_step_reach_the_scheduler_with_the_step_that_is_taken(
    open_engine: Open, nvme_path: Path
) -> None:
    told: list[Any] = []

    class Scheduler:
        def step(self, metric: float = 0.0) -> None:
            told.append(metric)

    config = make_config(("none", "none"), nvme_path, accumulation=2)
    engine = open_engine(build("gpt"), config, lr_scheduler=Scheduler())
    for index, arguments in enumerate([{"metric": 1.0}, {"metric": 2.0}, None, None]):
        engine.backward(engine(tokens(index)))
        engine.step(lr_kwargs=arguments)
    engine.backward(engine(tokens(4)))
    engine.optimizer.step()
    assert told == [2.0, 0.0, 0.0]


def test_a_scheduler_that_counts_samples_is_told_of_those_of_the_step(open_engine: Open, nvme_path: Path) -> None:
    class Counting:  # as Megatron's
        samples = 0

        def step(self, increment: int) -> None:
            self.samples += increment

    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path), lr_scheduler=Counting())
    train(engine, 0, 1)
    assert engine.lr_scheduler.samples == engine.global_samples > 0


# ---- where it comes from -----------------------------------------------------------------------

FORMS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "an object of torch": lambda passed: torch_schedulers.StepLR(passed, 2),
    "a chain": lambda passed: torch_schedulers.SequentialLR(
        passed, [torch_schedulers.ConstantLR(passed, 0.5), torch_schedulers.ExponentialLR(passed, 0.9)], [2]
    ),
    "an object of ours": lambda passed: WarmupLR(passed, 0.0, 1e-2, 5),
    "a function": lambda passed: lambda optimizer: torch_schedulers.StepLR(optimizer, 2),
    "a partial": lambda passed: partial(WarmupDecayLR, total_num_steps=9),
    "a class": lambda passed: WarmupLR,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_handed_over_is_stepped_and_goes_before_the_config(
    open_engine: Open, nvme_path: Path, form: str
) -> None:
    model = build("gpt")
    passed = plain_adamw(model)
    config = make_config(("none", "none"), nvme_path, optimizer={}, scheduler={"type": "OneCycle", "params": {
        "cycle_min_lr": 1, "cycle_max_lr": 2}})  # fmt: skip
    engine = open_engine(model, config, optimizer=passed, lr_scheduler=FORMS[form](passed))
    before = engine.lr_scheduler.state_dict()
    assert not isinstance(engine.lr_scheduler, OneCycle)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        train(engine, 0)
    assert engine.lr_scheduler.state_dict() != before
    assert max(engine.get_lr()) < 1


@pytest.mark.parametrize("passed", [False, True], ids=["named", "an object"])
def test_a_schedule_of_another_optimizer_is_refused(open_engine: Open, nvme_path: Path, passed: bool) -> None:
    model = build("gpt")
    other = torch_schedulers.StepLR(plain_adamw(model), 2)
    config = make_config(("none", "none"), nvme_path, **({"optimizer": {}} if passed else {}))
    with pytest.raises(ConfigError, match="lr_scheduler: expected a schedule of the optimizer that is used"):
        open_engine(model, config, optimizer=plain_adamw(model) if passed else None, lr_scheduler=other)


def test_a_schedule_over_the_groups_that_the_optimizer_was_made_of_is_its_own(
    open_engine: Open, nvme_path: Path
) -> None:
    """As accelerate does: it makes another optimizer of the groups of the one that the schedule drives."""
    model = build("gpt")
    first = plain_adamw(model)
    schedule = torch_schedulers.LambdaLR(first, lambda step: 0.5**step)
    config = make_config(("none", "none"), nvme_path, optimizer={})
    engine = open_engine(model, config, optimizer=torch.optim.AdamW(first.param_groups), lr_scheduler=schedule)
    before = engine.get_lr()
    train(engine, 0)
    assert engine.get_lr() == [lr / 2 for lr in before]


def test_a_schedule_reads_the_counters_of_the_steps_before(open_engine: Open, nvme_path: Path) -> None:
    read: list[tuple[int, int]] = []

    class Reader:
        def step(self) -> None:
            read.append((engine.global_steps, engine.global_samples))

    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path), lr_scheduler=Reader())
    train(engine, 0, 1, 2)
    batch = engine.train_batch_size()
    assert read == [(0, 0), (1, batch), (2, 2 * batch)]
    assert (engine.global_steps, engine.global_samples) == (3, 3 * batch)


def test_a_step_whose_schedule_fails_is_counted(open_engine: Open, nvme_path: Path) -> None:
    class Failing:
        def step(self) -> None:
            raise ArithmeticError("no rate")

    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path), lr_scheduler=Failing())
    with pytest.raises(ArithmeticError):
        train(engine, 0)
    assert engine.global_steps == 1


def test_without_an_optimizer_a_configured_scheduler_is_left_out(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("none", "none"), nvme_path, optimizer={}, scheduler={"type": "WarmupLR"})
    assert open_engine(build("gpt"), config).lr_scheduler is None


def test_auto_as_largest_rate_is_that_of_the_optimizer(open_engine: Open, nvme_path: Path) -> None:
    params = {"warmup_max_lr": "auto", "warmup_min_lr": "auto", "total_num_steps": 9, "warmup_num_steps": 2}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, scheduler=scheduler))
    assert (engine.lr_scheduler.min_lrs, engine.lr_scheduler.max_lrs) == ([0.0], [ADAMW["lr"]])


@pytest.mark.parametrize(
    ("given", "scheduler", "named"),
    [
        (3, None, "lr_scheduler: expected an object with step()"),
        (lambda optimizer: None, None, "lr_scheduler: expected a callable that returns"),
        (
            lambda optimizer: torch_schedulers.ReduceLROnPlateau(optimizer),
            None,
            "ReduceLROnPlateau needs a metric",
        ),
        (None, {"type": "WarmupLR", "params": {"warmup_min_lr": [1, 2, 3]}}, "warmup_min_lr: expected 1 values"),
        (None, {"type": "MultiStepLR", "params": {"milestones": 3}}, "MultiStepLR cannot be made"),
        (None, {"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: WarmupDecayLR needs a value"),
        (None, {"type": "OneCycle", "params": {"cycle_min_lr": 0}}, "scheduler.params.cycle_max_lr: OneCycle needs"),
        (None, {"type": "LambdaLR", "params": {"lr_lambda": 3}}, "LambdaLR cannot be made"),
    ],
)
def test_a_scheduler_that_cannot_be_is_an_error_that_leaves_the_model_as_it_was(
    open_engine: Open, nvme_path: Path, given: Any, scheduler: Any, named: str
) -> None:
    model = build("gpt")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = make_config(("nvme", "nvme"), nvme_path)
    if scheduler is not None:
        config["scheduler"] = scheduler
    with pytest.raises(ConfigError) as caught:
        open_engine(model, config, lr_scheduler=given)
    assert named in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(nvme_path.iterdir())


# ---- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OneCycle", "WarmupDecayLR", "WarmupCosineLR", "StepLR"])
def test_a_resumed_run_goes_on_with_the_schedule_of_the_uninterrupted_one(
    open_engine: Open, nvme_path: Path, tmp_path: Path, kind: str
) -> None:
    def opened() -> Any:
        model = build("gpt")
        config = make_config(("nvme", "nvme"), nvme_path, scheduler={"type": kind, "params": CONFIGURED[kind]})
        return open_engine(model, config, model_parameters=in_two_groups(model))

    whole = opened()
    train(whole, *range(3))
    whole.save_checkpoint(tmp_path / "saved")
    resumed = opened()
    resumed.load_checkpoint(tmp_path / "saved")
    assert resumed.get_lr() == whole.get_lr() == resumed.lr_scheduler.get_last_lr()
    train(whole, *range(3, 6))
    train(resumed, *range(3, 6))
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert unequal(resumed, whole) == []


# ---- the block of the configuration ------------------------------------------------------------


def problems(scheduler: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"scheduler": scheduler})
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ({"type": "WarmupLR", "params": {"total_num_steps": 1}}, '"total_num_steps" (of WarmupDecayLR, Warmup'),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 1, "warmup_max_lr": 1}}, '"warmup_max_lr" (of '),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, "scheduler.params.warmup_num_steps: "),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}, "a whole number"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, '"log" or "linear"'),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [0, "x"]}}, "warmup_min_lr: expected a finite"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": -2}}, "at least -1"),
        ({"type": "WarmupLR", "params": {"step_size": 2}}, "scheduler.params.step_size: unknown key"),
        ({"type": "StepLR", "params": {"step_size": 2, "gama": 1}}, "the nearest known key is 'gamma'"),
        ({"type": "StepLR", "params": {"step_size": 2, "warmup_num_steps": 1}}, '"warmup_num_steps" (of WarmupLR'),
        ({"type": "WarmupLr2"}, "the nearest is WarmupLR"),
        ({"type": "SequentialLR"}, "pass the object to initialize as lr_scheduler"),
        ({"type": "LRScheduler"}, "or a class of torch.optim.lr_scheduler"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_take_is_a_problem_with_its_way_out(scheduler: Any, line: str) -> None:
    assert any(line in found for found in problems(scheduler)), problems(scheduler)


def test_a_block_may_ask_for_no_steps_of_warming_up(open_engine: Open, nvme_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_type": "linear"}}
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, scheduler=scheduler))
    assert engine.lr_scheduler.warmup_num_steps == 2


@pytest.mark.parametrize("kind", CONFIGURED)
def test_a_scheduler_block_reads_the_same_from_its_effective_form_and_keeps_what_was_given(kind: str) -> None:
    block = {"type": kind.lower(), "params": CONFIGURED[kind]}
    config = load_config({"scheduler": block})
    again = load_config(json.loads(json.dumps(config.as_dict())))
    assert again.as_dict() == config.as_dict() and config.inactive == ()
    assert config.scheduler is not None and config.scheduler.kind is class_of(kind)
    given = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.scheduler.params.user_options.items()
    }
    assert given == numbers(CONFIGURED[kind])
    assert {config.origin(f"scheduler.params.{key}") for key in CONFIGURED[kind]} == {"user"}


def test_a_block_without_a_type_asks_for_nothing(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("none", "none"), nvme_path, scheduler={"params": {"warmup_num_steps": 3}})
    assert open_engine(build("gpt"), config).lr_scheduler is None
