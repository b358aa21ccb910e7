"""Where bytes live never changes a number.

Every placement of weights and states trains to the same bits as the plain-torch reference, whatever is accumulated,
clipped, frozen, unused, cut into sub-groups or squeezed into a budget. A run counts only if weights were fetched and
every unit was released at least once a step; `trained` checks that too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from models import ADAMW, FixedGradients, Output, build, make_config, seeded, tokens, trainability
from pairwise import in_pairs
from reference import Hyper, Reference, differences, norm_exact, snapshot

from offload.errors import BudgetError

DEVICES = ("none", "cpu", "nvme")
PAIRS = tuple(itertools.product(DEVICES, DEVICES))
STEPS = 4

Open = Callable[..., Any]


@dataclass(frozen=True)
class Scenario:
    """One training run, told apart from where its bytes live."""

    model: str = "gpt"
    accumulation: int = 1
    clipping: float = 0.0
    backwards: int = 1
    """Forward and backward passes before each call of step()."""
    bf16: bool = True
    steps: int = STEPS
    sub_group_numel: int | None = None
    hyper: Hyper = field(default=Hyper(ADAMW["lr"], tuple(ADAMW["betas"]), ADAMW["eps"], ADAMW["weight_decay"]))  # type: ignore[arg-type]

    def config(self, pair: tuple[str, str], nvme_path: Any, **more: Any) -> dict[str, Any]:
        keys = dict(more.pop("zero", {}))
        if self.sub_group_numel is not None:
            keys["sub_group_size"] = self.sub_group_numel
        return make_config(
            pair,
            nvme_path,
            accumulation=self.accumulation,
            clipping=self.clipping,
            bf16=self.bf16,
            zero=keys,
            **more,
        )


def train(trainer: Any, scenario: Scenario) -> None:
    """The one loop: `trainer` is an engine or the reference."""
    index = 0
    for step in range(scenario.steps):
        for _ in range(scenario.accumulation):
            for _ in range(scenario.backwards):
                forward_and_backward(trainer, scenario.model, index, step)
                index += 1
            trainer.step()


def forward_and_backward(trainer: Any, model: str, index: int, step: int) -> None:
    named = {"branch": step} if model == "branching" else {}
    out = trainer(tokens(index), **named)
    if isinstance(out, tuple):
        trainer.backward(out[0], retain_graph=True)
        out = out[1]
    trainer.backward(out.loss if isinstance(out, Output) else out)


@cache
def expected(scenario: Scenario) -> Reference:
    """The reference after its run; cached, since nine placements share it."""
    reference = Reference(
        build(scenario.model),
        lambda name: scenario.hyper,
        bf16=scenario.bf16,
        clipping=scenario.clipping,
        accumulation=scenario.accumulation,
    )
    train(reference, scenario)
    if scenario.clipping:
        clipped = sum(coefficient < 1 for coefficient in reference.coefficients)
        assert clipped >= scenario.steps // 2, "the scenario was meant to clip"
    return reference


def trained(open_engine: Open, scenario: Scenario, config: dict[str, Any], **more: Any) -> Any:
    """An engine after the scenario's run, equal to the reference in every bit and every promise."""
    model = build(scenario.model)
    names = trainability(model)
    engine = open_engine(model, config, **more)
    train(engine, scenario)
    assert_units_came_and_went(engine, scenario.steps)
    reference = expected(scenario)
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    return engine


def assert_units_came_and_went(engine: Any, steps: int, idle: frozenset[str] = frozenset()) -> None:
    """The validity condition: without it an equality may compare two runs that never moved a byte."""
    statistics = engine.statistics()
    assert statistics.gathered_bytes > 0
    assert statistics.releases_by_unit
    seldom = {unit: n for unit, n in statistics.releases_by_unit.items() if n < steps and unit not in idle}
    assert not seldom, f"units released fewer than {steps} times: {seldom}"


SCENARIOS = {
    "plain": Scenario(steps=20),
    "accumulated, clipped, sub-groups cut units": Scenario(accumulation=4, clipping=0.3, sub_group_numel=4096),
    "accumulated": Scenario(accumulation=4, model="tied"),
    "two backwards, clipped, frozen and unused parameters": Scenario(
        model="mixed", backwards=2, clipping=0.3, sub_group_numel=8192
    ),
}


@in_pairs(name=SCENARIOS, params=DEVICES, states=DEVICES)
def test_every_placement_trains_to_the_bits_of_the_reference(
    open_engine: Open, nvme_path: Any, name: str, params: str, states: str
) -> None:
    scenario = SCENARIOS[name]
    engine = trained(open_engine, scenario, scenario.config((params, states), nvme_path))
    if scenario.sub_group_numel is not None:
        assert max(unit.numel for unit in engine.units) > scenario.sub_group_numel, "the sub-group must cut a unit"


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("alias", [True, False], ids=["alias", "copy"])
@pytest.mark.parametrize("sub_group_numel", [None, 4096])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("clipping", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_whole_product_trains_to_the_bits_of_the_reference(
    open_engine: Open,
    nvme_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    alias: bool,
    sub_group_numel: int | None,
    backwards: int,
    clipping: float,
    accumulation: int,
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    scenario = Scenario("mixed", accumulation, clipping, backwards, sub_group_numel=sub_group_numel)
    trained(open_engine, scenario, scenario.config(pair, nvme_path))


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("scenario", [Scenario(), Scenario("two_losses", clipping=0.3)], ids=lambda s: s.model)
def test_copying_gathered_units_instead_of_aliasing_them_changes_nothing(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, pair: tuple[str, str]
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "1")
    trained(open_engine, scenario, scenario.config(pair, nvme_path))


@pytest.mark.parametrize("model", ["lora", "odd_sizes", "reused", "branching", "structured", "two_losses"])
@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_every_model_structure_trains_to_the_bits_of_the_reference(
    open_engine: Open, nvme_path: Any, model: str, pair: tuple[str, str]
) -> None:
    scenario = Scenario(model, clipping=0.3 if model != "lora" else 0.0, accumulation=2)
    config = scenario.config(pair, nvme_path)
    if model != "branching":
        trained(open_engine, scenario, config)
        return
    built = build(model)
    names = trainability(built)
    engine = open_engine(built, config)
    train(engine, scenario)
    assert_units_came_and_went(engine, scenario.steps // 2)  # each branch runs in every second step
    reference = expected(scenario)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    taken = {engine.full_state(f"blocks.{block}.up.weight")["step"] for block in (1, 2)}
    assert taken == {scenario.steps // 2}, "a parameter without a gradient must not count a step"


@cache
def budget_range(accumulation: int, folder: str) -> tuple[int, int]:
    """(host bytes of the bare working set, bytes that lie on NVMe then) of the middle-sized GPT."""
    import zero

    config = middle_config(Scenario(accumulation=accumulation), folder)
    with zero.initialize(model=build("middle"), config=config)[0] as engine:
        least = sum(row.nbytes for row in engine.plan.rows if row.tier == "host")
        return least, sum(row.nbytes for row in engine.plan.rows if row.tier == "nvme")


def middle_config(scenario: Scenario, nvme_path: Any) -> dict[str, Any]:
    keys = {"stage3_max_live_parameters": 4_000_000, "stage3_prefetch_bucket_size": 800_000, "sub_group_size": 65_536}
    return scenario.config(("nvme", "nvme"), nvme_path, zero=keys)


@pytest.mark.parametrize(
    ("accumulation", "share"),
    [
        *[(1, 0.0), (4, 0.1), (1, 0.3), (4, 0.6), (1, 2.0)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 0.0), (1, 0.1), (4, 0.3), (1, 0.6), (4, 2.0)]),
    ],
)
def test_every_budget_trains_to_the_bits_of_the_reference(
    open_engine: Open, nvme_path: Any, accumulation: int, share: float
) -> None:
    scenario = Scenario("middle", accumulation, 0.3)
    least, rest = budget_range(accumulation, str(nvme_path))
    config = {**middle_config(scenario, nvme_path), "memory_budget": {"host": int(least + share * rest)}}
    engine = trained(open_engine, scenario, config)
    on_nvme = sum(row.nbytes for row in engine.plan.rows if row.tier == "nvme")
    assert (on_nvme > 0) is (share < 1)


@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_a_second_backward_that_nobody_announced_takes_what_the_budget_has_left(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    """With all planes in memory there is no swap space either."""
    scenario = Scenario(backwards=2, steps=3)
    engine = trained(open_engine, scenario, scenario.config(pair, nvme_path, memory_budget={"host": 1 << 30}))
    assert engine.plan.tier_bytes("nvme") == 0


def test_a_second_backward_that_nobody_announced_is_refused_where_the_budget_has_nothing_left(
    open_engine: Open, nvme_path: Any
) -> None:
    config = Scenario().config(("cpu", "cpu"), nvme_path, memory_budget={"host": 1 << 30})
    planned = open_engine(build("gpt"), config).plan.tier_bytes("host")
    engine = open_engine(build("gpt"), {**config, "memory_budget": {"host": planned + 64}})
    engine.backward(engine(tokens(0)))
    with pytest.raises(BudgetError, match=r"a second backward before step\(\) needs .* more bytes"):
        engine.backward(engine(tokens(1)))


@pytest.mark.parametrize("live_numel", [26_000, 60_000, 1_000_000_000])
def test_every_live_limit_trains_to_the_bits_of_the_reference(
    open_engine: Open, nvme_path: Any, live_numel: int
) -> None:
    scenario = Scenario(clipping=0.3)
    config = scenario.config(("nvme", "nvme"), nvme_path, zero={"stage3_max_live_parameters": live_numel})
    trained(open_engine, scenario, config)


@pytest.mark.parametrize("bucket_numel", [0, 15_000, 1_000_000])
@pytest.mark.parametrize("reuse_numel", [0, 1_000_000_000])
def test_looking_ahead_and_keeping_units_changes_no_number(
    open_engine: Open, nvme_path: Any, bucket_numel: int, reuse_numel: int
) -> None:
    scenario = Scenario(clipping=0.3)
    keys = {"stage3_prefetch_bucket_size": bucket_numel, "stage3_max_reuse_distance": reuse_numel}
    trained(open_engine, scenario, scenario.config(("nvme", "nvme"), nvme_path, zero=keys))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_fp32_trains_to_the_bits_of_the_reference(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    scenario = Scenario(clipping=0.3, accumulation=2, bf16=False)
    trained(open_engine, scenario, scenario.config(pair, nvme_path))


def fixed_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 3) for shape in FixedGradients.SHAPES]


FP32_EPS = 2.0**-23


def ulps_allowed(theirs: torch.Tensor, lr: float, steps: int) -> torch.Tensor:
    """A few ulp a step: two of the parameter (decay and subtraction round) and eight of an update of size lr."""
    return steps * FP32_EPS * (2 * theirs.abs() + 8 * lr)


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_reference_follows_torch_within_a_few_ulp_per_step(kind: str) -> None:
    hyper = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled=kind == "AdamW")
    with seeded(0):
        ours, theirs = FixedGradients(), FixedGradients()
        theirs.load_state_dict(ours.state_dict())
    reference = Reference(ours, lambda name: hyper, bf16=False)
    optimizer = OPTIMIZERS[kind](theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        reference.backward(reference(fixed_gradients(step)))
        reference.step()
        optimizer.zero_grad()
        theirs(fixed_gradients(step)).backward()
        optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert ((a - b).abs() <= ulps_allowed(b, 1e-2, step + 1)).all()


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("pair", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_fp32_follows_torch_within_a_few_ulp_per_step_on_identical_gradients(
    open_engine: Open, nvme_path: Any, kind: str, pair: tuple[str, str]
) -> None:
    with seeded(0):
        model, theirs = FixedGradients(), FixedGradients()
        theirs.load_state_dict(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    engine = open_engine(
        model,
        make_config(pair, nvme_path, bf16=False, optimizer={}),
        optimizer=OPTIMIZERS[kind](model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    )
    optimizer = OPTIMIZERS[kind](theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        engine.backward(engine(fixed_gradients(step)))
        engine.step()
        optimizer.zero_grad()
        theirs(fixed_gradients(step)).backward()
        optimizer.step()
        for name, b in zip(names, theirs.parameters(), strict=True):
            a = engine.full_parameter(name)
            assert ((a - b).abs() <= ulps_allowed(b, 1e-2, step + 1)).all(), name


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")], ids="-".join)
def test_param_groups_of_a_passed_optimizer_keep_their_own_hyper_parameters(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    decay = Hyper(2e-2, (0.9, 0.95), 1e-8, 0.3)
    no_decay = replace(decay, lr=5e-3, betas=(0.8, 0.99), weight_decay=0.0)

    def hyper_of(name: str) -> Hyper:
        return no_decay if "norm" in name or name.endswith("bias") else decay

    model = build("gpt")
    names = trainability(model)
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if hyper_of(name) is hyper],
            "lr": hyper.lr,
            "betas": hyper.betas,
            "weight_decay": hyper.weight_decay,
        }
        for hyper in (decay, no_decay)
    ]
    scenario = Scenario(clipping=0.3, sub_group_numel=4096)
    config = scenario.config(pair, nvme_path, optimizer={})
    engine = open_engine(model, config, optimizer=torch.optim.AdamW(groups, lr=1e-3, eps=1e-8))
    reference = Reference(build("gpt"), hyper_of, clipping=0.3)
    train(engine, scenario)
    train(reference, scenario)
    assert_units_came_and_went(engine, scenario.steps)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("source", ["config", "passed"])
def test_adam_adds_its_decay_to_the_gradient(open_engine: Open, nvme_path: Any, source: str) -> None:
    hyper = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1, decoupled=False)  # type: ignore[arg-type]
    scenario = Scenario(hyper=hyper, clipping=0.3)
    if source == "config":
        section = {"type": "Adam", "params": {**ADAMW, "adam_w_mode": False}}
        trained(open_engine, scenario, scenario.config(("nvme", "nvme"), nvme_path, optimizer=section))
        return
    model = build("gpt")
    names = trainability(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=0.1)
    config = scenario.config(("nvme", "nvme"), nvme_path, optimizer={})
    engine = open_engine(model, config, optimizer=optimizer)
    train(engine, scenario)
    reference = expected(scenario)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def warmup_then_decay(step: int) -> float:
    return (step + 1) / 5 if step < 5 else 0.9 ** (step - 4)


@pytest.mark.parametrize("source", ["callable", "instance"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_scheduler_changes_the_learning_rate_of_every_step_once(
    open_engine: Open, nvme_path: Any, source: str, accumulation: int
) -> None:
    scenario = Scenario(accumulation=accumulation)
    base = scenario.hyper
    model = build("gpt")
    names = trainability(model)
    if source == "callable":
        config = scenario.config(("nvme", "nvme"), nvme_path)
        more: dict[str, Any] = {
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_decay)
        }
    else:
        config = scenario.config(("nvme", "nvme"), nvme_path, optimizer={})
        passed = torch.optim.AdamW(
            model.parameters(), lr=base.lr, betas=base.betas, eps=base.eps, weight_decay=base.weight_decay
        )
        more = {
            "optimizer": passed,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(passed, warmup_then_decay),
        }
    engine = open_engine(model, config, **more)
    reference = Reference(
        build("gpt"),
        lambda name: replace(base, lr=base.lr * warmup_then_decay(len(reference.norms) - 1)),
        accumulation=accumulation,
    )
    train(engine, scenario)
    train(reference, scenario)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_a_learning_rate_written_into_the_groups_acts_from_the_next_step_on(open_engine: Open, nvme_path: Any) -> None:
    import zero

    scenario = Scenario(steps=1)
    rates = [1e-2, 3e-3, 0.0, 2e-2]
    model = build("gpt")
    names = trainability(model)
    engine, optimizer, _, _ = zero.initialize(model=model, config=scenario.config(("nvme", "nvme"), nvme_path))
    with engine:
        reference = Reference(build("gpt"), lambda name: replace(scenario.hyper, lr=rates[len(reference.norms) - 1]))
        for rate in rates:
            loss = engine(tokens(0))
            engine.backward(loss)
            for group in optimizer.param_groups:
                group["lr"] = rate
            engine.step()
            train(reference, scenario)
        assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_the_norm_is_the_exact_norm_within_the_rounding_of_squares(open_engine: Open, nvme_path: Any) -> None:
    """Each square is off by 2^-47 of the largest one at most, and the sum and its root are rounded to fp64."""
    scenario = Scenario(clipping=0.3, steps=5)
    engine = trained(open_engine, scenario, scenario.config(("nvme", "nvme"), nvme_path))
    exact = Reference(build("gpt"), lambda name: scenario.hyper, clipping=0.3)
    norms: list[float] = []
    for step in range(scenario.steps):
        exact.backward(exact(tokens(step)))
        norms.append(norm_exact(exact.grads))
        exact.step()
    assert engine.get_global_grad_norm() == exact.norms[-1]
    numel = sum(parameter.numel() for parameter in exact.model.parameters())
    for ours, truth in zip(exact.norms, norms, strict=True):
        assert abs(ours - truth) <= (numel * 2.0**-47 + 2.0**-52) * truth


def test_training_twice_gives_the_same_bits(open_engine: Open, nvme_path: Any) -> None:
    scenario = Scenario("mixed", 2, 0.3, backwards=2, steps=6)
    names = trainability(build("mixed"))
    runs = []
    for _ in range(2):
        engine = trained(open_engine, scenario, scenario.config(("nvme", "nvme"), nvme_path))
        runs.append(snapshot(engine, names))
    assert differences(*runs) == []


def test_parameters_never_given_a_gradient_keep_their_first_value(open_engine: Open, nvme_path: Any) -> None:
    scenario = Scenario("mixed", steps=4)
    engine = trained(open_engine, scenario, scenario.config(("nvme", "nvme"), nvme_path))
    first = dict(build("mixed").named_parameters())
    for name in ("spare", "unused.weight", "unused.bias"):
        assert torch.equal(engine.full_master(name), first[name].detach())
        assert engine.full_state(name)["step"] == 0


def test_masters_keep_the_bits_of_an_fp32_model(open_engine: Open, nvme_path: Any) -> None:
    model = build("gpt")
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = open_engine(model, Scenario().config(("nvme", "nvme"), nvme_path))
    for name, value in first.items():
        assert torch.equal(engine.full_master(name), value), name
