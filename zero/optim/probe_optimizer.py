"""Finds out, on a few elements, what an optimizer keeps of a parameter, and whether it is element-wise.

[Note: what is tried] A matrix of 8 x 16 is trained by the class itself; its two halves, flat and apart, by the tiled
rule as the engine would. Weights and states have to be the same, bit for bit, and the numbers of both halves too. Who
looks at a norm, a mean, a shape or another element gives itself away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError
from zero.optim.rules import Scalar
from zero.optim.tiled_rule import NOT_OF_THE_CLASS, Initial, TiledRule, TileValues

SHAPE, HALF, STEPS = (8, 16), 64, 12
"""Steps: enough for what begins later, such as RAdam's adaptive rate, or slow weights every sixth step."""
TRIAL_LR = 1e-2
EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8)
ALTERNATIVE = (
    'set optimizer.type in the config to an element-wise one ("AdamW", "Lion", "Adagrad", "SGD", or one of torch.optim '
    "such as RMSprop, Adamax, NAdam, RAdam, Adadelta, Rprop, ASGD), or pass such an optimizer"
)


@dataclass
class _Found:
    """What states had after some steps, over all param groups."""

    planes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)


def rule_for(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> TiledRule:
    """The rule of an element-wise optimizer.

    Args:
        optimizer: an instance; it is left as it is.
        groups: its param groups, whose options decide what it keeps.

    Raises:
        ConfigError: it is not element-wise, or keeps what cannot be kept; names it and what to use instead.
    """
    initial = _initial(optimizer)
    bare = TiledRule(optimizer, initial)
    found = _Found()
    seen: list[dict[str, Any]] = []
    for group in groups:
        options = bare.options_of(group)
        if options not in seen:
            seen.append(options)
            _check_trains(bare, options)
            _look(bare, options, found)
    rule = TiledRule(optimizer, initial, tuple(found.planes), found.planes, found.scalars)
    for options in seen:
        _try(rule, options)
    return rule


def refusal(name: str, why: str) -> ConfigError:
    """Of an optimizer that cannot run over tiles."""
    return ConfigError(
        f"optimizer: {name} is not available: {why}, and states are updated in pieces, wherever they are kept; "
        f"{ALTERNATIVE}"
    )


def _initial(optimizer: torch.optim.Optimizer) -> Initial:
    """What its constructor has made of every parameter's state, if anything."""
    fills: dict[str, Scalar] = {}
    numbers: dict[str, Scalar] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(parameter, Tensor) else ():
            if not isinstance(value, (bool, int, float, Tensor)):
                raise refusal(type(optimizer).__name__, f"its state {key} is a {type(value).__name__}")
            if not isinstance(value, Tensor) or value.dim() == 0:
                scalar, known = Scalar.of(value), numbers
            elif value.numel() == 0:
                continue
            else:
                flat, known = value.detach().reshape(-1), fills
                scalar = Scalar.of(flat[0])
                if not bool((flat == flat[0]).all()):
                    raise _not_fresh()
            if known.setdefault(key, scalar).value != scalar.value:
                raise _not_fresh()
    if "step" in numbers and numbers["step"].value:
        raise _not_fresh()
    return Initial(fills, numbers)


def _not_fresh() -> ConfigError:
    return ConfigError("optimizer: has state already; pass a fresh one, its states are kept by the engine")


def _samples(count: int) -> list[Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, device="cpu") for _ in range(count)]


def _look(rule: TiledRule, options: Mapping[str, Any], found: _Found) -> None:
    """Train the matrix, and note what is kept of it."""
    start, *gradients = _samples(STEPS + 1)
    for state in _train_whole(rule, options, start, gradients)[1]:
        for name, value in state.items():
            if value is None:
                continue
            if isinstance(value, Tensor) and value.shape == SHAPE:
                if value.dtype not in EXACT_IN_FP32:
                    raise refusal(rule.name, f"its state {name} is {value.dtype}")
                found.planes.setdefault(name, value.dtype)
            elif isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                found.scalars.setdefault(name, Scalar.of(value))
            else:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise refusal(rule.name, f"its state {name} is {what}, not of the parameter's shape")
    both = found.planes.keys() & found.scalars.keys()
    if both:
        raise refusal(rule.name, f"its state {', '.join(sorted(both))} is a number and a tensor")


def _check_trains(rule: TiledRule, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a class whose step leaves its parameters alone, such as one that calls other optimizers.

    A learning rate of 0, with which a warmup begins, is replaced for the trial.
    """
    start, *gradients = _samples(STEPS + 1)
    for more in ({}, {"lr": TRIAL_LR}) if "lr" in options else ({},):
        if not torch.equal(_train_whole(rule, {**options, **more}, start, gradients)[0][-1], start):
            return
    raise refusal(
        rule.name,
        "its step changes nothing of the parameter in its param group (other optimizers that it holds have parameters "
        "of their own, which the engine does not see)",
    )


def _train_whole(
    rule: TiledRule, options: Mapping[str, Any], start: Tensor, gradients: list[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
    """Weights, states and options after each step, by the class itself; raises ConfigError if it cannot do that."""
    parameter = torch.nn.Parameter(start.clone())
    twin = rule.twin(parameter, dict(options), rule.fresh(parameter.detach()))
    weights, states, left = [], [], []
    attributes = dict(rule.attributes)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        try:
            rule.kind.step(twin)
        except Exception as error:
            raise refusal(rule.name, f"its step fails on a matrix alone ({type(error).__name__}: {error})") from error
        weights.append(parameter.detach().clone())
        state = twin.state.get(parameter, {})
        states.append({k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()})
        left.append({key: value for key, value in twin.param_groups[0].items() if key != "params"})
        now = {key: value for key, value in vars(twin).items() if key not in NOT_OF_THE_CLASS}
        changed = [key for key in attributes | now if now.get(key) is not attributes.get(key)]
        if changed or any(isinstance(key, str) for key in twin.state):
            raise refusal(rule.name, f"it keeps {', '.join(changed) or 'a state'} for all parameters together")
    return weights, states, left


def _try(rule: TiledRule, options: Mapping[str, Any]) -> None:
    """Train the matrix whole and in halves. Raises ConfigError if that is not the same."""
    start, *gradients = _samples(STEPS + 1)
    weights, states, left = _train_whole(rule, options, start, gradients)
    halves = list(start.reshape(-1, HALF).clone().unbind())
    planes = [{name: torch.zeros(HALF, device="cpu") for name in rule.states} for _ in halves]
    values = TileValues(dict(options), None)
    for step, gradient in enumerate(gradients):
        pieces = [*zip(halves, gradient.reshape(-1, HALF).unbind(), planes, strict=True)]
        # A third piece of one element, without a gradient, tells what the numbers become; see `TiledRule.after`.
        pieces.append((torch.zeros(1, device="cpu"), *_nothing(rule)))
        results = []
        for half, part, held in pieces:
            try:
                results.append(rule.step(half, part.clone(), held, values))
            except Exception as error:
                raise refusal(rule.name, f"it does not take flat pieces ({type(error).__name__}: {error})") from error
        numbers = [rule.progress_of(state) for state, _ in results]
        same = all(found == numbers[0] for found in numbers) and all(said == left[step] for _, said in results)
        if not same or dict(numbers[0].scalars) != _numbers_of(states[step]):
            raise refusal(rule.name, "the numbers that it keeps depend on the gradient")
        if not torch.equal(torch.cat(halves), weights[step].reshape(-1)):
            raise refusal(rule.name, "it is not element-wise: two halves of a parameter are not trained as the whole")
        values = TileValues(results[0][1], numbers[0])
    for name in rule.states:
        whole = states[-1].get(name)
        joined = torch.cat([held[name] for held in planes])
        if whole is not None and not torch.equal(joined, whole.reshape(-1).to(torch.float32)):
            raise refusal(rule.name, f"its state {name} is not element-wise")


def _nothing(rule: TiledRule) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradient and planes of one element."""
    return torch.zeros(1, device="cpu"), {name: torch.zeros(1, device="cpu") for name in rule.states}


def _numbers_of(state: Mapping[str, Any]) -> dict[str, Scalar]:
    return {k: Scalar.of(v) for k, v in state.items() if not (isinstance(v, Tensor) and v.numel() > 1)}
