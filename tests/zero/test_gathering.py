"""`GatheredParameters`: whole values inside, edits kept, everything else untouched."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import build, make_config, tokens, trainability
from probe import units_read_once
from reference import Hyper, Reference, differences, snapshot
from torch import Tensor, nn

import offload.memory.flat_storage
import zero
from offload.errors import StateError
from zero.params.released_parameter import ReleasedParameter, store_of

Open = Callable[..., Any]
PAIRS = [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "none"), ("none", "none")]
HYPER = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1)


def stepped(trainer: Any, *indices: int) -> Any:
    for index in indices:
        trainer.backward(trainer(tokens(index)))
        trainer.step()
    return trainer


def made(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str] = PAIRS[0], model: str = "gpt", **zero_keys: Any
) -> Any:
    return stepped(open_engine(build(model), make_config(pair, nvme_path, zero=zero_keys)), 0, 1)


def whole_state(engine: Any) -> dict[str, dict[str, Any]]:
    """Weights, masters and moments of every parameter."""
    with units_read_once(engine):
        return {
            name: {
                "weight": engine.full_parameter(name),
                "master": engine.full_master(name),
                **(engine.full_state(name) if parameter.requires_grad else {}),
            }
            for name, parameter in engine.module.named_parameters()
        }


def changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    """`name:what` of all that is not the same bits."""
    return {
        f"{name}:{what}"
        for name, values in before.items()
        for what, value in values.items()
        if not (torch.equal(value, after[name][what]) if isinstance(value, Tensor) else value == after[name][what])
    }


def released(engine: Any) -> bool:
    return all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) == b.view(torch.int32)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_an_edit_changes_the_edited_elements_and_nothing_else(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    engine = made(open_engine, nvme_path, pair)
    name = "blocks.1.up.weight"
    parameter = engine.module.get_parameter(name)
    before = whole_state(engine)
    with zero.GatheredParameters([parameter]), torch.no_grad():
        parameter[3] = 0.25
        parameter[7, 5] = -1.0
    after = whole_state(engine)
    assert changed(before, after) == {f"{name}:weight", f"{name}:master"}
    edited = torch.zeros(128, 32, dtype=torch.bool)
    edited[3], edited[7, 5] = True, True
    assert torch.equal(after[name]["weight"][3], torch.full((32,), 0.25, dtype=torch.bfloat16))
    # What was edited is its own master now; what was not keeps every bit below the bf16 weight.
    assert torch.equal(after[name]["master"][edited], after[name]["weight"][edited].float())
    assert same_bits(after[name]["master"], before[name]["master"])[~edited].all()
    masters_had_a_remainder = before[name]["master"][~edited] != before[name]["weight"][~edited].float()
    assert masters_had_a_remainder.any(), "otherwise there was nothing to preserve"


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_looking_without_editing_changes_nothing(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    engine = made(open_engine, nvme_path, pair)
    before = whole_state(engine)
    with zero.GatheredParameters(engine.module.parameters()):
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.detach(), before[name]["weight"]), name
    assert changed(before, whole_state(engine)) == set()
    assert released(engine)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_is_taken_of_values_inside_outlasts_them_and_edits_nothing(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    """On a CPU `p.detach().cpu()` is no copy: a state dict collected so has to hold values, also over older looks."""
    engine, twin = made(open_engine, nvme_path, pair), made(open_engine, nvme_path, pair)
    held: dict[str, Any] = {}

    def look(module: nn.Module, _: Any) -> None:
        held.update({names[parameter]: parameter.detach() for parameter in module.parameters(recurse=False)})

    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    hooks = [module.register_forward_pre_hook(look) for module in engine.module.modules()]
    engine.eval()
    engine(tokens(4))
    engine.train()
    for hook in hooks:
        hook.remove()
    assert held.keys() == set(names.values())
    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter]):
            held[name] = parameter.detach().cpu()
    values = {name: engine.full_parameter(name) for name in held}
    made_of = {}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(held[name], values[name])
        with zero.GatheredParameters([parameter]):
            made_of[name] = nn.Parameter(parameter.data)
            held[name] = parameter.detach().cpu()
    assert released(engine)
    assert changed(whole_state(twin), whole_state(engine)) == set()
    for name, taken in held.items():
        with torch.no_grad():
            assert torch.equal(taken, values[name]) and torch.equal(made_of[name], values[name])
            made_of[name].zero_()
    assert changed(whole_state(stepped(twin, 2, 3)), whole_state(stepped(engine, 2, 3))) == set()
    assert all(not taken.any() for taken in held.values())


def test_an_edit_that_writes_the_same_value_keeps_the_master(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    before = whole_state(engine)
    with zero.GatheredParameters([engine.module.head.weight]), torch.no_grad():
        engine.module.head.weight.copy_(engine.module.head.weight.clone())
    assert changed(before, whole_state(engine)) == set()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_training_goes_on_from_the_edited_values(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    model = build("gpt")
    names = trainability(model)
    engine = open_engine(model, make_config(pair, nvme_path))
    reference = Reference(build("gpt"), lambda name: HYPER)
    for round_ in range(3):
        stepped(engine, round_)
        stepped(reference, round_)
        name = ("blocks.0.down.weight", "position", "norm.bias")[round_]
        parameter = model.get_parameter(name)
        with zero.GatheredParameters(parameter), torch.no_grad():
            parameter.mul_(-0.5)
        reference.edit(name, reference.full_parameter(name) * -0.5)
    stepped(engine, 5)
    stepped(reference, 5)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("pair", PAIRS[:2], ids="-".join)
def test_nested_contexts_keep_the_edits_of_all_of_them(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    engine = made(open_engine, nvme_path, pair)
    up, down = engine.module.blocks[0].up.weight, engine.module.blocks[0].down.weight  # one unit
    other = engine.module.head.weight
    with torch.no_grad(), zero.GatheredParameters([up, other]):
        up[0] = 1.0
        with zero.GatheredParameters([down, up]):
            assert (up[0] == 1.0).all()
            down[0] = 2.0
            up[1] = 3.0
        assert (down[0] == 2.0).all() and (up[1] == 3.0).all(), "the outer context still holds the unit"
        up[2] = 4.0
        other[0] = 5.0
    assert released(engine)
    up, down = engine.full_parameter("blocks.0.up.weight"), engine.full_parameter("blocks.0.down.weight")
    assert [float(up[i, 0]) for i in range(3)] == [1.0, 3.0, 4.0] and float(down[0, 0]) == 2.0
    assert float(engine.full_parameter("head.weight")[0, 0]) == 5.0


def generator_of(parameters: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield from parameters


GIVEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "single": lambda p: p,
    "list": lambda p: [p],
    "tuple": lambda p: (p,),
    "generator": lambda p: generator_of([p]),
    "duplicates": lambda p: [p, p, p],
    "set": lambda p: {p},
    "with ordinary ones": lambda p: [nn.Parameter(torch.ones(2)), p, torch.ones(3)],
}


@pytest.mark.parametrize("given", GIVEN)
def test_parameters_may_be_given_in_any_form(open_engine: Open, nvme_path: Any, given: str) -> None:
    engine = made(open_engine, nvme_path)
    parameter = engine.module.norm.weight
    with zero.GatheredParameters(GIVEN[given](parameter), modifier_rank=0), torch.no_grad():
        assert not isinstance(parameter, ReleasedParameter)
        parameter.fill_(0.5)
    assert released(engine)
    assert (engine.full_parameter("norm.weight") == 0.5).all()


def test_ordinary_parameters_and_empty_lists_are_left_alone(open_engine: Open, nvme_path: Any) -> None:
    ordinary = nn.Parameter(torch.ones(3))
    for given in ([], [ordinary], ordinary):
        with zero.GatheredParameters(given):
            ordinary.data.add_(1)
    assert ordinary.tolist() == [4.0] * 3 or ordinary.tolist() == [4, 4, 4]


def test_disabled_it_does_nothing(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    with zero.GatheredParameters(engine.module.parameters(), enabled=False):
        assert released(engine)
        with pytest.raises(StateError):
            engine.module.norm.weight.sum()


def test_an_exception_inside_closes_the_context_and_keeps_what_was_edited(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    parameter = engine.module.norm.weight
    with pytest.raises(KeyError), zero.GatheredParameters([parameter]), torch.no_grad():
        parameter.fill_(0.5)
        raise KeyError("inside")
    assert released(engine)
    assert (engine.full_parameter("norm.weight") == 0.5).all()
    stepped(engine, 3)


def test_an_interrupt_at_the_end_of_opening_leaves_nothing_open(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, twin = made(open_engine, nvme_path), made(open_engine, nvme_path)
    keeper, fetch = type(store_of(engine.module.norm.bias)), type(store_of(engine.module.norm.bias)).begin_gather

    def fetch_and_interrupt(self: Any, parameters: Any) -> None:
        fetch(self, parameters)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(keeper, "begin_gather", fetch_and_interrupt)
            with zero.GatheredParameters([engine.module.norm.bias]):
                pytest.fail("the context was entered")
    finally:
        signal.signal(signal.SIGINT, before)
    assert released(engine)
    assert changed(whole_state(stepped(twin, 2)), whole_state(stepped(engine, 2))) == set()


def test_one_context_object_may_be_entered_again(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    parameter = engine.module.norm.bias
    context = zero.GatheredParameters([parameter])
    for value in (1.0, 2.0):
        with context, torch.no_grad():
            parameter.fill_(value)
        assert released(engine)
        assert (engine.full_parameter("norm.bias") == value).all()


@pytest.mark.parametrize("pair", PAIRS[:2], ids="-".join)
def test_evaluating_inside_sees_the_edits(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    engine = made(open_engine, nvme_path, pair)
    engine.eval()
    with torch.no_grad():
        plain = engine(tokens(9))
        with zero.GatheredParameters([engine.module.head.weight]):
            engine.module.head.weight.zero_()
            flat = engine(tokens(9))
        assert torch.equal(engine(tokens(9)), flat)
    assert flat == torch.log(torch.tensor(64.0)) or abs(float(flat) - 4.1589) < 1e-3
    assert not torch.equal(plain, flat)
    engine.train()
    stepped(engine, 4)


def test_a_forward_and_backward_inside_train_like_outside(open_engine: Open, nvme_path: Any) -> None:
    """Users gather in the middle of a loop, to log norms say."""
    inside, outside = made(open_engine, nvme_path), made(open_engine, nvme_path)
    with zero.GatheredParameters([inside.module.blocks[0].up.weight, inside.module.position]):
        loss = inside(tokens(5))
        inside.backward(loss)
    inside.step()
    stepped(outside, 5)
    assert changed(whole_state(inside), whole_state(outside)) == set()


def test_between_forward_and_backward_values_may_be_read(open_engine: Open, nvme_path: Any) -> None:
    inside, outside = made(open_engine, nvme_path), made(open_engine, nvme_path)
    loss = inside(tokens(5))
    with zero.GatheredParameters(inside.module.parameters()):
        taken = [p.data for p in inside.module.parameters()]
        assert all(bool(values.isfinite().all()) for values in taken)
    for values in taken:
        values.zero_()  # not the model's any more
    inside.backward(loss)
    inside.step()
    stepped(outside, 5)
    assert changed(whole_state(inside), whole_state(outside)) == set()


@pytest.fixture(params=[True, False], ids=["swap", "no swap"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch can swap storages."""
    monkeypatch.setattr(offload.memory.flat_storage, "CAN_SWAP", request.param)
    return bool(request.param)


@pytest.mark.parametrize("reuse", [0, 10**7], ids=["released", "live"])
@pytest.mark.parametrize("looked", [False, True], ids=["", "read with gradients before"])
def test_a_backward_inside_of_a_forward_outside_trains_like_outside(
    open_engine: Open, nvme_path: Any, swaps: bool, looked: bool, reuse: int
) -> None:
    """Views that autograd saved see values inside; a unit that the backward is done with stays until the end."""
    keys = {"stage3_max_reuse_distance": reuse, "stage3_max_live_parameters": 10**7}
    inside, outside = (made(open_engine, nvme_path, **keys) for _ in range(2))
    losses = []
    for engine in (inside, outside):
        loss, weight = engine(tokens(5)), engine.module.norm.weight
        losses.append(loss + weight.float().square().sum() if looked and reuse else loss)
    with zero.GatheredParameters(inside.module.parameters()):
        inside.backward(losses[0])
        assert not any(isinstance(p, ReleasedParameter) for p in inside.module.parameters())
        assert all(bool(p.isfinite().all()) for p in inside.module.parameters())
    outside.backward(losses[1])
    inside.step()
    outside.step()
    assert changed(whole_state(inside), whole_state(outside)) == set()
    assert changed(whole_state(stepped(inside, 6)), whole_state(stepped(outside, 6))) == set()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_views_from_before_see_the_values_and_edit_them(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    engine = made(open_engine, nvme_path, pair)
    before = {name: engine.full_parameter(name) for name in engine.module.state_dict()}
    views = engine.module.state_dict()
    with zero.GatheredParameters(list(engine.module.parameters())):
        assert {name for name, view in views.items() if not torch.equal(view, before[name])} == set()
        views["norm.bias"].fill_(0.5)
    assert torch.equal(engine.full_parameter("norm.bias"), torch.full_like(before["norm.bias"], 0.5))
    fine = {name for name in before if torch.equal(engine.full_parameter(name), before[name])}
    assert fine == before.keys() - {"norm.bias"}


def test_parameters_of_two_units_may_exchange_their_data(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    first, second = engine.module.blocks[0].norm_in.weight, engine.module.norm.weight
    names = "blocks.0.norm_in.weight", "norm.weight"
    before = [engine.full_parameter(name) + shift for name, shift in zip(names, (1, 2), strict=True)]
    with zero.GatheredParameters([first, second]), torch.no_grad():
        first.add_(1)
        second.add_(2)
        first.data, second.data = second.data, first.data
    assert all(torch.equal(engine.full_parameter(n), v) for n, v in zip(names, reversed(before), strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_in_inference_mode_values_are_read_and_edited(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    engine, twin = made(open_engine, nvme_path, pair), made(open_engine, nvme_path, pair)
    with torch.inference_mode():
        assert torch.equal(engine.full_parameter("norm.bias"), twin.full_parameter("norm.bias"))
        with zero.GatheredParameters([engine.module.norm.bias]):
            engine.module.norm.bias.fill_(0.5)
    with zero.GatheredParameters([twin.module.norm.bias]), torch.no_grad():
        twin.module.norm.bias.fill_(0.5)
    assert changed(whole_state(stepped(twin, 2, 3)), whole_state(stepped(engine, 2, 3))) == set()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_persistent_units_are_edited_too(open_engine: Open, nvme_path: Any, pair: tuple[str, str]) -> None:
    engine = made(open_engine, nvme_path, pair, stage3_param_persistence_threshold=64)
    assert any(unit.persistent for unit in engine.units)
    before = whole_state(engine)
    with zero.GatheredParameters([engine.module.norm.bias]), torch.no_grad():
        engine.module.norm.bias[4] = 0.75
    after = whole_state(engine)
    assert changed(before, after) == {"norm.bias:weight", "norm.bias:master"}
    assert float(after["norm.bias"]["master"][4]) == 0.75
    keep = torch.arange(32) != 4
    assert same_bits(after["norm.bias"]["master"], before["norm.bias"]["master"])[keep].all()
    stepped(engine, 6)


def test_tied_weights_are_edited_under_both_names(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path, model="tied")
    with zero.GatheredParameters([engine.module.head.weight]), torch.no_grad():
        engine.module.head.weight[0] = 0.125
        assert (engine.module.embedding.weight[0] == 0.125).all()
    for name in ("head.weight", "embedding.weight"):
        assert (engine.full_parameter(name)[0] == 0.125).all()


def test_frozen_parameters_may_be_edited(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path, model="mixed")
    with zero.GatheredParameters([engine.module.embedding.weight]), torch.no_grad():
        engine.module.embedding.weight[1] = 0.5
    assert (engine.full_parameter("embedding.weight")[1] == 0.5).all()
    stepped(engine, 3)
    assert (engine.full_parameter("embedding.weight")[1] == 0.5).all()


def test_empty_and_tiny_parameters_may_be_gathered(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path, model="odd_sizes")
    model = engine.module
    with zero.GatheredParameters([model.nothing, model.one, model.scalar, model.odd]), torch.no_grad():
        assert model.nothing.numel() == 0 and model.scalar.dim() == 0
        model.scalar.fill_(2.0)
        model.odd[512] = 3.0
    assert float(engine.full_parameter("scalar")) == 2.0 and float(engine.full_parameter("odd")[512]) == 3.0


def test_parameters_of_two_engines_may_be_gathered_together(open_engine: Open, nvme_path: Any) -> None:
    first, second = made(open_engine, nvme_path), made(open_engine, nvme_path)
    with zero.GatheredParameters([first.module.norm.weight, second.module.norm.weight]), torch.no_grad():
        first.module.norm.weight.copy_(second.module.norm.weight * 2)
    expected = second.full_parameter("norm.weight") * 2
    assert torch.equal(first.full_parameter("norm.weight"), expected)


def test_gathering_after_close_is_refused(open_engine: Open, nvme_path: Any) -> None:
    engine = made(open_engine, nvme_path)
    engine.close()
    with pytest.raises(StateError, match="closed"), zero.GatheredParameters([engine.module.norm.weight]):
        pass
