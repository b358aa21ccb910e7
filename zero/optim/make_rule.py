"""Makes param groups and an update rule from a name in the config or an optimizer object.

[Note: element-wise classes] A class of the table, or one whose own body says `is_element_wise = True`, updates tiles.
Any other class updates whole parameters, which is always right. What no rule can do is refused: the class trains a
small parameter by itself, and the rule trains the same one as the engine would; weights, states and numbers must be
equal, bit for bit. One parameter is trained for each number of dimensions that the class's parameters have. Only rules
over whole parameters have small states: of another shape than the parameter, or a tensor of one element that depends on
the gradient.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.errors import ConfigError
from zero.config import Config
from zero.config.optimizer_block import OptimizerConfig
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam, KernelAdam
from zero.ops.lamb import FusedLamb
from zero.ops.lion import DeepSpeedCPULion, FusedLion, Lion
from zero.ops.schedule_free import AdamWScheduleFree
from zero.optim.averages import with_averages
from zero.optim.kernel_rules import ROWS, KernelRule
from zero.optim.muon import muon_from
from zero.optim.optimizer import ExternalStateOptimizer
from zero.optim.rules import (
    NO_SMALL,
    NOT_COPIED,
    AdamRule,
    InitialState,
    Rule,
    Rules,
    Scalar,
    TiledRule,
    TileValues,
    TrainedParameters,
)

logger = logging.getLogger("zero")

# With these options torch's Adam computes the same as our kernel.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}
# Steps: enough for parts that begin later, such as RAdam's adaptive rate, or slow weights every sixth step.
SHAPE, HALF, STEPS = (8, 16), 64, 12
TRIAL_LR = 1e-2  # A smaller learning rate, such as the 0 with which a warmup begins, is raised to it.
EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8)
OWN_CLASSES: Mapping[str, Callable[..., torch.optim.Optimizer]] = {  # with DeepSpeed's defaults
    "Lion": FusedLion,
    "Lamb": FusedLamb,
    "AdamWScheduleFree": AdamWScheduleFree,
}
ALTERNATIVE = (
    'set optimizer.type in the config ("AdamW", "Lion", "Muon", "Lamb", "Adafactor", "Adagrad", "SGD", or one of '
    "torch.optim such as RMSprop, Adamax, NAdam, RAdam, Adadelta, Rprop, ASGD), or pass such an optimizer"
)
# An element's update depends on this element alone. For exactly these classes: a subclass may compute something else.
ELEMENT_WISE: frozenset[type[torch.optim.Optimizer]] = frozenset([
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    AdamWScheduleFree, DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion, Lion,
])  # fmt: skip
FLAG = "is_element_wise"  # In the body of any other class: whether it is.
# Elements of small states per element of a parameter. Means of the rows and columns of an m x n matrix have
# m + n <= m n + 1 elements; preconditioners of both sides have m^2 + n^2 >= 2 m n.
SMALL_SHARE_MAX = 1.5
# Shapes of whole parameters for trials, by their number of dimensions.
TRIAL_SHAPES = {0: (), 1: (128,), 2: SHAPE, 3: (4, 4, 8), 4: (4, 4, 2, 4)}


def make_trained_parameters(
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None,
    model_parameters: Iterable[Any] | None,
    model: nn.Module,
    config: Config,
) -> TrainedParameters | None:
    """Param groups and rules of the optimizer that was passed, else of the config; None if there is neither.

    Raises ConfigError: the optimizer, its param groups or its block in the config cannot be used here.
    """
    if optimizer is not None:
        trained = _from_optimizer(optimizer, model_parameters, model, config)
    elif config.optimizer is not None:
        entries: list[Any] = list(model.parameters() if model_parameters is None else model_parameters)
        groups = _make_groups(entries, model)
        frozen = WeakTensorKeyDictionary()
        for number, group in enumerate(groups):
            frozen.update({p: number for p in group["params"] if not p.requires_grad})
            group["params"] = [p for p in group["params"] if p.requires_grad]
        trained = _from_config(config, config.optimizer, groups, model)
        if entries and isinstance(entries[0], dict) and len(trained.rules.each) == 1:  # Muon makes groups of its own
            # With frozen parameters the caller's groups do not change: they also have the frozen ones.
            groups = trained.groups if frozen else _update_callers_groups(entries, trained.groups)
            trained = replace(trained, groups=groups, frozen=frozen)
    else:
        return None
    _check_masters(trained.rules, config)
    return replace(trained, rules=with_averages(trained.rules, config))


def _from_optimizer(
    optimizer: torch.optim.Optimizer | Callable[..., Any],
    model_parameters: Iterable[Any] | None,
    model: nn.Module,
    config: Config,
) -> TrainedParameters:
    frozen = WeakTensorKeyDictionary()
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        entries = list(model.parameters() if model_parameters is None else model_parameters)
        optimizer = optimizer(_without_frozen(entries, frozen))
    if isinstance(optimizer, ExternalStateOptimizer):
        raise ConfigError(
            f"optimizer: expected a fresh torch.optim.Optimizer, got the {type(optimizer).__name__} that an engine, or "
            "OffloadOptimizer, has made; close that, and make a new optimizer of the parameters"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "or leave it out and set optimizer.type in the config"
        )
    groups = _check_groups(optimizer.param_groups, model)
    return TrainedParameters(groups, Rules((rule_of_object(optimizer, config),)), optimizer, frozen=frozen)


def _without_frozen(entries: Sequence[Any], frozen: MutableMapping[Tensor, int]) -> list[Any]:
    """The parameters, or groups, without frozen parameters: each parameter in a group gets states and gradients.

    `entries`: parameters, (name, parameter) pairs, or groups of these. `frozen`: gets the parameters that are left out,
    with the numbers of their groups.
    """
    trained = []
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            members = [p for p in _list_parameters(entry) if _parameter_of_entry(p).requires_grad]
            frozen.update(
                {_parameter_of_entry(p): number for p in entry["params"] if not _parameter_of_entry(p).requires_grad}
            )
            trained.append(entry if len(members) == len(entry["params"]) else {**entry, "params": members})
        elif _parameter_of_entry(entry).requires_grad:
            trained.append(entry)
    return trained


def _parameter_of_entry(entry: Any) -> Tensor:
    """The parameter of an entry: itself, or the second of a pair with its name."""
    parameter: Tensor = entry[1] if isinstance(entry, tuple) else entry
    return parameter


def _list_parameters(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a caller's group, which has them as a list afterwards, as with torch."""
    entries = group["params"]
    group["params"] = parameters = [entries] if isinstance(entries, Tensor) else list(entries)
    return parameters


def _make_groups(entries: list[Any], model: nn.Module) -> list[dict[str, Any]]:
    """New param groups of the parameters, or like the groups, that were passed."""
    if any(isinstance(entry, tuple) for entry in entries):
        raise ConfigError("model_parameters: got (name, parameter) pairs; pass model.parameters() or param groups")
    as_groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    return _check_groups([{**g, "params": _list_parameters(g)} for g in as_groups], model)


def _update_callers_groups(callers: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The caller's own dicts with all options: as with torch, a value written into them later is used."""
    for callers_group, group in zip(callers, groups, strict=True):
        callers_group.update(group)
    return callers


def _check_masters(rules: Rules, config: Config) -> None:
    """Raise ConfigError if the config has no fp32 masters and a rule needs them."""
    others = [rule.name for rule in rules.each if not isinstance(rule, AdamRule)]
    if config.bf16_masters and others:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads: true is only available with Adam and AdamW, whose kernel rounds "
            f"weights at random, got {others[0]}; set it to false"
        )


def rule_of_object(optimizer: torch.optim.Optimizer, config: Config) -> Rule:
    """The rule of an optimizer without states. Raises ConfigError: there is none, or the config does not allow it."""
    return _check_state_dtype(_rule_of(optimizer), config)


def _from_config(
    config: Config, block: OptimizerConfig, groups: list[dict[str, Any]], model: nn.Module
) -> TrainedParameters:
    """Param groups and rules of the config's optimizer block."""
    if block.type == "Muon":
        muon = muon_from(block, groups, model)
        for rule in muon.rules.each:
            _check_state_dtype(rule, config)
        return muon
    if block.is_plain_adam and not any(group.get("amsgrad") or group.get("maximize") for group in groups):
        params = block.params
        common = {
            "lr": params.lr,
            "betas": tuple(params.betas),
            "eps": params.eps,
            "weight_decay": block.weight_decay,
            "decoupled": block.decoupled_weight_decay,
        }
        if not params.bias_correction:
            common["bias_correction"] = False
        rule = AdamRule(decoupled=block.decoupled_weight_decay, defaults=common)
        return TrainedParameters([{**common, **group} for group in groups], Rules((rule,)))
    kind = _class_of(block)
    try:
        optimizer = kind([nn.Parameter(torch.zeros(1, device="cpu", dtype=torch.float32))], **block.options())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error
    merged = [{**optimizer.defaults, **group} for group in groups]
    return TrainedParameters(merged, Rules((_check_state_dtype(rule_for(optimizer, merged), config),)))


def _class_of(block: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    if block.type in OWN_CLASSES:
        return OWN_CLASSES[block.type]
    name = ("AdamW" if block.decoupled_weight_decay else "Adam") if block.type in ("Adam", "AdamW") else block.type
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind


def _rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer object; the engine takes over its param groups."""
    if isinstance(optimizer, KernelAdam):
        decoupled, is_adam = optimizer.adam_w_mode, _same_step(optimizer, KernelAdam)
    else:
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        is_adam = _same_step(optimizer, torch.optim.Adam) or _same_step(optimizer, torch.optim.AdamW)
    is_plain = all(group.get(key, value) == value for group in optimizer.param_groups for key, value in _PLAIN.items())
    if not (is_adam and is_plain):
        return rule_for(optimizer, optimizer.param_groups)
    if any(optimizer.state.values()):
        raise ConfigError(
            "optimizer: it already has state; pass a new one, because the engine keeps the optimizer state itself"
        )
    for group in optimizer.param_groups:
        group["decoupled"] = bool(group.get("decoupled_weight_decay", decoupled))
    return AdamRule(decoupled=decoupled, defaults=optimizer.defaults)


def _same_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """True if the optimizer is of the class, or of a subclass with the same step."""
    own = type(optimizer)
    if not isinstance(optimizer, kind) or inspect.unwrap(own.step) is not inspect.unwrap(kind.step):
        return False
    return not issubclass(kind, KernelAdam) or own.update is kind.update  # type: ignore[attr-defined]


def _check_state_dtype(rule: Rule, config: Config) -> Rule:
    state_dtype = config.zero_optimization.offload_optimizer.state_dtype
    if state_dtype != "fp32" and not isinstance(rule, AdamRule):
        raise ConfigError(
            f"zero_optimization.offload_optimizer.state_dtype: {state_dtype} is only available with Adam and AdamW, "
            f"got {rule.name}; set it to fp32"
        )
    return rule


def _check_groups(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The groups, if every parameter in them is the model's."""
    known = {id(p) for p in model.parameters()}
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    foreign = [tuple(p.shape) for p in trained if id(p) not in known]
    if foreign:
        raise ConfigError(
            f"optimizer: {len(foreign)} parameters do not belong to the model (shapes {foreign[:4]}); build the "
            "optimizer from the parameters of the model that is passed, and make a loss or head that has weights a "
            "submodule of it"
        )
    ids = [id(p) for p in trained]
    if len(set(ids)) < len(ids):
        names = [name for name, p in model.named_parameters() if ids.count(id(p)) > 1]
        raise ConfigError(
            f"optimizer: {', '.join(names[:4])}: expected each parameter once, got {len(names)} of them several times, "
            "and Adam would count its steps as often; pass each once, as model.parameters() does with tied weights"
        )
    return groups


@dataclass
class _FoundStates:
    """The states found after some steps, over all param groups."""

    arrays: dict[str, torch.dtype] = field(default_factory=dict)  # Name -> dtype, of states of the parameter's shape.
    scalars: dict[str, Scalar] = field(default_factory=dict)
    small: dict[str, tuple[int, ...]] = field(default_factory=dict)  # Name -> the shape of a parameter that has it.


def rule_for(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]], *, torch_as_kernels: bool = True
) -> TiledRule:
    """The rule of an optimizer's class: over tiles if it is known as element-wise, else over whole parameters.

    Raises ConfigError: it has a state that we cannot keep; names the state and alternatives.

    Args:
        optimizer: an instance; it is not changed.
        groups: its param groups; their options decide which states it keeps.
        torch_as_kernels: torch's own classes are updated by kernels too, if there are such kernels.
    """
    with torch.device("cpu"):  # for states that the class makes on the default device
        return _make_rule(optimizer, list(groups), torch_as_kernels)


def _make_rule(optimizer: torch.optim.Optimizer, groups: list[Mapping[str, Any]], torch_as_kernels: bool) -> TiledRule:
    kind, initial = type(optimizer), _initial_state(optimizer)
    bare = TiledRule(optimizer, initial)
    all_options: list[dict[str, Any]] = []
    for group in groups:
        options = bare.options_of(group)
        if options not in all_options:
            all_options.append(options)
    found = _FoundStates()
    for options in all_options:
        _find_states(bare, options, SHAPE, found)
    arguments = (optimizer, initial, tuple(found.arrays), found.arrays, found.scalars)
    if kind in ELEMENT_WISE:
        by_kernel = kind in ROWS and (torch_as_kernels or kind.__module__.startswith("zero."))
        return (KernelRule if by_kernel else TiledRule)(*arguments)
    flag = vars(kind).get(FLAG)  # not inherited: a subclass may compute something else
    if flag and found.small:
        why = f"{FLAG} is True, but it keeps states that do not have the parameter's shape ({', '.join(found.small)})"
        raise unavailable_error(kind.__name__, why)
    if flag:
        rule = TiledRule(*arguments)
        for options in all_options:
            _compare_with_class(rule, options, SHAPE)
        return rule
    if flag is None and not found.small and not kind.__module__.startswith(("torch.optim", "zero.ops.")):
        logger.warning(
            f"optimizer: {kind.__name__} is an unknown class, so it updates whole parameters, which needs more memory "
            f"than tiles. If each element's update depends on this element alone, set {kind.__name__}.{FLAG} = True, "
            "else False"
        )
    return _whole_parameter_rule(bare, arguments, groups, all_options, found)


def _whole_parameter_rule(
    bare: TiledRule,
    arguments: tuple[Any, ...],
    groups: list[Mapping[str, Any]],
    all_options: list[dict[str, Any]],
    found: _FoundStates,
) -> TiledRule:
    """The rule of a class that gets whole parameters. Raises ConfigError: see `rule_for`."""
    shapes = [p.shape for group in groups for p in group["params"]]
    trials = [TRIAL_SHAPES.get(d, SHAPE) for d in sorted({len(shape) for shape in shapes} or {len(SHAPE)})]
    of_matrix = found.arrays.keys() | found.scalars.keys()
    for trial in trials:
        names = {name for options in all_options for name in _find_states(bare, options, trial, found)}
        if of_matrix - names:
            raise unavailable_error(
                bare.name,
                f"for a parameter of {len(trial)} dimensions it lacks states that it keeps for a matrix "
                f"({', '.join(sorted(of_matrix - names))})",
            )
        for name in (found.arrays.keys() | found.scalars.keys()) - of_matrix:  # only such parameters have these
            found.arrays.pop(name, None)
            found.scalars.pop(name, None)
            found.small[name] = trial
    rule = TiledRule(*arguments, needs_whole_parameters=True, small=tuple(found.small), tried_options=all_options)
    for trial in trials:
        for options in all_options:
            _compare_with_class(rule, options, trial)
    _check_small(rule, shapes, found)
    return rule


def _check_small(rule: TiledRule, shapes: list[tuple[int, ...]], found: _FoundStates) -> None:
    """Raise ConfigError if small states are made late, or are not small."""
    for name, shape in found.small.items():
        if name not in rule.small_shapes(shape):
            raise unavailable_error(
                rule.name, f"its state {name} is made after the first step and does not have the parameter's shape"
            )
    small_shapes = {shape: rule.small_shapes(shape) for shape in set(shapes)}
    numel = sum(math.prod(shape) for shape in shapes)
    small_numel = sum(size.numel() for shape in shapes for size, _ in small_shapes[shape].values())
    if small_numel > SMALL_SHARE_MAX * numel:
        sizes = {name: size for states in small_shapes.values() for name, (size, _) in states.items()}
        name = max(sizes, key=lambda name: sizes[name].numel())
        raise unavailable_error(
            rule.name,
            f"its state {name} has the shape {tuple(sizes[name])}, not the parameter's; such states stay in memory, "
            f"and with {small_numel:,} elements for parameters of {numel:,} elements they are too large",
        )


def unavailable_error(name: str, why: str) -> ConfigError:
    """The error for an optimizer that cannot be run parameter by parameter."""
    return ConfigError(
        f"optimizer: {name} is not available: {why}, but the engine updates weights and states in pieces; {ALTERNATIVE}"
    )


def _initial_state(optimizer: torch.optim.Optimizer) -> InitialState:
    """The states that its constructor has made for every parameter, if any."""
    fills: dict[str, Scalar] = {}
    numbers: dict[str, Scalar] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(parameter, Tensor) else ():
            if not isinstance(value, (bool, int, float, Tensor)):
                raise unavailable_error(type(optimizer).__name__, f"its state {key} is a {type(value).__name__}")
            if not isinstance(value, Tensor) or value.dim() == 0:
                scalar, target = Scalar.from_value(value), numbers
            elif value.numel() == 0:
                continue
            elif value.shape != parameter.shape:
                what = f"of shape {tuple(value.shape)}, which is not the parameter's shape"
                raise unavailable_error(type(optimizer).__name__, f"its constructor makes a state {key} {what}")
            else:
                flat, target = value.detach().reshape(-1), fills
                scalar = Scalar.from_value(flat[0])
                if not bool((flat == flat[0]).all()):
                    raise _not_fresh_error()
            if target.setdefault(key, scalar).value != scalar.value:
                raise _not_fresh_error()
    if "step" in numbers and numbers["step"].value:
        raise _not_fresh_error()
    return InitialState(fills, numbers)


def _not_fresh_error() -> ConfigError:
    return ConfigError(
        "optimizer: it already has state; pass a new one, because the engine keeps the optimizer state itself"
    )


def _samples(shape: tuple[int, ...]) -> list[Tensor]:
    """A weight, and a gradient for each step."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for _ in range(STEPS + 1)]


def _find_states(rule: TiledRule, options: Mapping[str, Any], shape: tuple[int, ...], found: _FoundStates) -> set[str]:
    """Train a parameter of the shape, and note which states it has; returns their names."""
    start, *gradients = _samples(shape)
    states = _train_whole(rule, options, start, gradients)[1]
    zero = torch.zeros(1, 1, device="cpu", dtype=torch.float32)
    states_of_zeros = _train_whole(rule, options, zero, [zero] * STEPS)[1]
    for state, state_of_zeros in zip(states, states_of_zeros, strict=True):
        for name, value in state.items():
            if value is None or name in found.small:
                continue
            if not isinstance(value, (bool, int, float, Tensor)):
                raise unavailable_error(rule.name, f"its state {name} is a {type(value).__name__}, not a tensor")
            if not isinstance(value, Tensor):
                found.scalars.setdefault(name, Scalar.from_value(value))
            # A state of a parameter without dimensions looks like a number; the matrix has shown its name before.
            elif value.shape == shape and (shape or name in found.arrays):
                if value.dtype not in EXACT_IN_FP32:
                    raise unavailable_error(rule.name, f"its state {name} is {value.dtype}")
                found.arrays.setdefault(name, value.dtype)
            # A tensor of one element that depends on the gradient, such as a parameter's norm, is a small state.
            elif value.numel() != 1 or _differs(value, state_of_zeros.get(name)):
                found.scalars.pop(name, None)
                found.small[name] = shape
            else:
                found.scalars.setdefault(name, Scalar.from_value(value))
    kinds = [*found.arrays, *found.scalars, *found.small]
    if ambiguous := {name for name in kinds if kinds.count(name) > 1}:
        raise unavailable_error(rule.name, f"its state {', '.join(sorted(ambiguous))} has several forms")
    return {name for state in states for name, value in state.items() if value is not None}


def _differs(number: Tensor, other: Any) -> bool:
    return Scalar.from_value(number) != Scalar.from_value(other)


def _train_whole(
    rule: TiledRule, options: Mapping[str, Any], start: Tensor, gradients: list[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
    """Weights, states and options after each step of the class itself; raises ConfigError if the step fails."""
    parameter = torch.nn.Parameter(start.clone())
    twin = rule.make_twin(parameter, dict(options), rule.fresh_state(parameter.detach()))
    weights, states, options_after = [], [], []
    attributes = dict(rule.attributes)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        try:
            rule.kind.step(twin)
        except Exception as error:
            raise unavailable_error(
                rule.name, f"its step fails on a single matrix ({type(error).__name__}: {error})"
            ) from error
        weights.append(parameter.detach().clone())
        state = twin.state.get(parameter, {})
        states.append({k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()})
        options_after.append({key: value for key, value in twin.param_groups[0].items() if key != "params"})
        now = {key: value for key, value in vars(twin).items() if key not in NOT_COPIED}
        changed = [key for key in attributes | now if now.get(key) is not attributes.get(key)]
        if changed or any(isinstance(key, str) for key in twin.state):
            raise unavailable_error(
                rule.name, f"it keeps {', '.join(changed) or 'a state'} in common for all parameters"
            )
    return weights, states, options_after


def _compare_with_class(rule: TiledRule, options: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Train a parameter by the class, and by the rule (whole, or in two halves). Raises ConfigError if they differ."""
    rate = options.get("lr")
    if isinstance(rate, (int, float)) and rate < TRIAL_LR:
        options = {**options, "lr": TRIAL_LR}
    start, *gradients = _samples(shape)
    weights, states, options_after = _train_whole(rule, options, start, gradients)
    if torch.equal(weights[-1], start):
        raise unavailable_error(
            rule.name,
            "its step does not change the parameter in its param group (if it holds other optimizers, the engine does "
            "not see their parameters)",
        )
    pieces_shape = (1, *shape) if rule.needs_whole_parameters else (-1, HALF)
    tiles = list(start.reshape(pieces_shape).clone().unbind())
    arrays = [{name: torch.zeros_like(tile) for name in rule.states} for tile in tiles]
    values, small = TileValues(dict(options), None), NO_SMALL
    for step, gradient in enumerate(gradients):
        pieces = zip(tiles, gradient.reshape(pieces_shape).unbind(), arrays, strict=True)
        small_of_element = rule.probe_small(values.options)
        try:
            results = [rule.step_tile(tile, part.clone(), state, values, small) for tile, part, state in pieces]
            # One element with gradient zero shows the numbers after the step; see `TiledRule.after_update`.
            results.append(rule.step_one_element(values, small_of_element))
        except Exception as error:
            raise unavailable_error(
                rule.name, f"its step fails on a piece of a parameter ({type(error).__name__}: {error})"
            ) from error
        numbers = rule.progress_of(states[step])
        expected_numbers = (dict(numbers.scalars), set(numbers.present), options_after[step])
        found = [(rule.progress_of(state), after) for state, after in results]
        if any((dict(own.scalars), set(own.present), after) != expected_numbers for own, after in found):
            raise unavailable_error(rule.name, "the numbers in its state depend on the gradient")
        small = rule.small_states_of(results[0][0])  # halves have none
        expected = rule.small_states_of(states[step])
        is_same = torch.equal(_join(tiles), weights[step].reshape(-1)) and small.keys() == expected.keys()
        if not is_same or not all(torch.equal(value, expected[name]) for name, value in small.items()):
            raise unavailable_error(
                rule.name,
                "a step depends on more than the parameter's weight, gradient and state"
                if rule.needs_whole_parameters
                else f"it has {FLAG} = True, and two halves of a parameter are not updated like the whole parameter",
            )
        values = TileValues(options_after[step], numbers)
    for name in rule.states:
        last = states[-1].get(name)
        if last is not None and not torch.equal(_join(each[name] for each in arrays), last.reshape(-1).float()):
            raise unavailable_error(rule.name, f"its state {name} depends on more than the parameter and its state")


def _join(pieces: Iterable[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])
