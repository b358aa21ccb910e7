"""Makes param groups and an update rule from a name in the config or an optimizer object.

[Note: what is tried] A trial on a few elements finds which states an optimizer keeps, and whether it is element-wise.
The class itself trains a matrix of 8 x 16. The tiled rule trains its two halves, flat and apart, as the engine would.
Weights and states must be equal, bit for bit, and the numbers of both halves must be equal too. A class that uses a
norm, a mean, a shape or other elements fails here. Such a class gets whole parameters, and is tried again: on one whole
parameter for each number of dimensions that its parameters have, bound as the engine would bind it. Only such a class
may have small states: of another shape than the parameter, or a tensor of one element that depends on the gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.errors import ConfigError
from zero.config import Config
from zero.config.optimizer_block import OptimizerConfig
from zero.ops.adam import KernelAdam
from zero.ops.lamb import FusedLamb, Lamb
from zero.ops.lion import FusedLion
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

# With these options torch's Adam computes the same as our kernel.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}
# Steps: enough for parts that begin later, such as RAdam's adaptive rate, or slow weights every sixth step.
SHAPE, HALF, STEPS = (8, 16), 64, 12
TRIAL_LR = 1e-2
# Scales of the weights: with one scale alone, a bounded ratio of norms may be at its bound, for the matrix and halves.
SCALES = (1.0, 1 / 32, 32.0)
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
    """The rule of an optimizer's class: over tiles if it is element-wise, else over whole parameters.

    Raises ConfigError: it has a state that we cannot keep; names the state and alternatives.

    Args:
        optimizer: an instance; it is not changed.
        groups: its param groups; their options decide which states it keeps.
        torch_as_kernels: torch's own classes are updated by kernels too, if there are such kernels.
    """
    with torch.device("cpu"):  # for states that the class makes on the default device
        return _rule_by_trial(optimizer, list(groups), torch_as_kernels)


def _rule_by_trial(
    optimizer: torch.optim.Optimizer, groups: list[Mapping[str, Any]], torch_as_kernels: bool
) -> TiledRule:
    initial = _initial_state(optimizer)
    bare = TiledRule(optimizer, initial)
    found = _FoundStates()
    all_options: list[dict[str, Any]] = []
    for group in groups:
        options = bare.options_of(group)
        if options not in all_options:
            all_options.append(options)
            _check_trains(bare, options)
            _find_states(bare, options, found)
    arguments = (optimizer, initial, tuple(found.arrays), found.arrays, found.scalars)
    if not found.small and not isinstance(optimizer, Lamb):
        by_kernel = type(optimizer) in ROWS and (torch_as_kernels or type(optimizer).__module__.startswith("zero."))
        rule = (KernelRule if by_kernel else TiledRule)(*arguments)
        if _is_element_wise(rule, all_options):
            return rule
    return _whole_parameter_rule(bare, arguments, groups, all_options, found)


def _is_element_wise(rule: TiledRule, all_options: list[dict[str, Any]]) -> bool:
    try:
        for options in all_options:
            for scale in SCALES:
                _compare_with_class(rule, options, scale=scale)
    except ConfigError:
        return False
    return True


def _whole_parameter_rule(
    bare: TiledRule,
    arguments: tuple[Any, ...],
    groups: list[Mapping[str, Any]],
    all_options: list[dict[str, Any]],
    found: _FoundStates,
) -> TiledRule:
    """The rule of a class that needs whole parameters. Raises ConfigError: see `rule_for`."""
    for options in all_options:
        _find_small_numbers(bare, options, found)
    shapes = [p.shape for group in groups for p in group["params"]]
    trials = [TRIAL_SHAPES.get(d, SHAPE) for d in sorted({len(shape) for shape in shapes} or {len(SHAPE)})]
    for trial in trials:
        _find_whole_states(bare, all_options, trial, found)
    rule = TiledRule(*arguments, needs_whole_parameters=True, small=tuple(found.small), tried_options=all_options)
    for trial in trials:
        for options in all_options:
            _compare_with_class(rule, options, trial)
    _check_small(rule, shapes, found)
    return rule


def _find_whole_states(
    rule: TiledRule, all_options: list[dict[str, Any]], shape: tuple[int, ...], found: _FoundStates
) -> None:
    """Train whole parameters of a shape: states that only they have are small. Raises ConfigError: they lack some."""
    here = _FoundStates(small=dict(found.small))
    for options in all_options:
        _find_states(rule, options, here, shape, found.arrays)
    for name in (here.arrays.keys() | here.scalars.keys()) - found.arrays.keys() - found.scalars.keys():
        here.arrays.pop(name, None), here.scalars.pop(name, None)
        here.small[name] = shape
    if here.arrays.keys() != found.arrays.keys() or here.scalars.keys() != found.scalars.keys():
        names = ", ".join(here.arrays | here.scalars)
        raise unavailable_error(
            rule.name, f"for a parameter of {len(shape)} dimensions it keeps other states ({names}) than for a matrix"
        )
    found.small.update(here.small)


def _find_small_numbers(rule: TiledRule, options: Mapping[str, Any], found: _FoundStates) -> None:
    """Numbers that depend on the gradient, such as a parameter's norm, are small states if they are tensors."""
    start, *gradients = _samples(STEPS + 1)
    zero = torch.zeros(1, 1, device="cpu", dtype=torch.float32)
    states = _train_whole(rule, options, start, gradients)[1]
    states_of_zeros = _train_whole(rule, options, zero, [zero] * STEPS)[1]
    for state, state_of_zeros in zip(states, states_of_zeros, strict=True):
        for name in [name for name in found.scalars if isinstance(state.get(name), Tensor)]:
            if Scalar.from_value(state[name]) != Scalar.from_value(state_of_zeros.get(name)):
                del found.scalars[name]
                found.small[name] = SHAPE


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


def _samples(count: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for _ in range(count)]


def _find_states(
    rule: TiledRule,
    options: Mapping[str, Any],
    found: _FoundStates,
    shape: tuple[int, ...] = SHAPE,
    array_names: Container[str] = (),
) -> None:
    """Train a parameter of the shape, and note which states it has."""
    start, *gradients = _samples(STEPS + 1, shape)
    for state in _train_whole(rule, options, start, gradients)[1]:
        for name, value in state.items():
            if value is None:
                continue
            if name in found.small:
                continue
            # A state of a parameter without dimensions looks like a number; the matrix has shown its name before.
            if isinstance(value, Tensor) and value.shape == shape and (shape or name in array_names):
                if value.dtype not in EXACT_IN_FP32:
                    raise unavailable_error(rule.name, f"its state {name} is {value.dtype}")
                found.arrays.setdefault(name, value.dtype)
            elif isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                found.scalars.setdefault(name, Scalar.from_value(value))
            elif isinstance(value, Tensor):
                found.small[name] = shape
            else:
                raise unavailable_error(rule.name, f"its state {name} is a {type(value).__name__}, not a tensor")
    kinds = [*found.arrays, *found.scalars, *found.small]
    if ambiguous := {name for name in kinds if kinds.count(name) > 1}:
        raise unavailable_error(rule.name, f"its state {', '.join(sorted(ambiguous))} has several forms")


def _check_trains(rule: TiledRule, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a class whose step does not change its parameters, such as one that calls other optimizers.

    A learning rate of 0, with which a warmup begins, is replaced for the trial.
    """
    start, *gradients = _samples(STEPS + 1)
    for changes in ({}, {"lr": TRIAL_LR}) if "lr" in options else ({},):
        if not torch.equal(_train_whole(rule, {**options, **changes}, start, gradients)[0][-1], start):
            return
    raise unavailable_error(
        rule.name,
        "its step does not change the parameter in its param group (if it holds other optimizers, the engine does not "
        "see their parameters)",
    )


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


def _compare_with_class(
    rule: TiledRule, options: Mapping[str, Any], shape: tuple[int, ...] = SHAPE, *, scale: float = 1.0
) -> None:
    """Train a parameter by the class, and in pieces (halves, or one) by the rule. Raises ConfigError if they differ."""
    start, *gradients = _samples(STEPS + 1, shape)
    start *= scale
    weights, states, options_after = _train_whole(rule, options, start, gradients)
    pieces_shape = (1, *shape) if rule.needs_whole_parameters else (-1, HALF)
    tiles = list(start.reshape(pieces_shape).clone().unbind())
    arrays = [{name: torch.zeros_like(tile) for name in rule.states} for tile in tiles]
    values, small = TileValues(dict(options), None), NO_SMALL
    for step, gradient in enumerate(gradients):
        pieces = zip(tiles, gradient.reshape(pieces_shape).unbind(), arrays, strict=True)
        small_of_element = rule.probe_small(values.options)
        try:
            results = [rule.step_tile(tile, part.clone(), state, values, small) for tile, part, state in pieces]
            # One more piece, one element with gradient zero, shows the numbers after the step; see
            # `TiledRule.after_update`.
            results.append(rule.step_one_element(values, small_of_element))
        except Exception as error:
            raise unavailable_error(
                rule.name, f"its step fails on flat pieces of a parameter ({type(error).__name__}: {error})"
            ) from error
        numbers = [rule.progress_of(state) for state, _ in results]
        same_numbers = all(progress == numbers[0] for progress in numbers)
        is_same = same_numbers and all(tile_options == options_after[step] for _, tile_options in results)
        if not is_same or dict(numbers[0].scalars) != _numbers_of(rule, states[step]):
            raise unavailable_error(rule.name, "the numbers in its state depend on the gradient")
        if not torch.equal(_join(tiles), weights[step].reshape(-1)):
            raise unavailable_error(
                rule.name, "it is not element-wise: two halves of a parameter are not updated like the whole parameter"
            )
        small = rule.small_states_of(results[0][0])  # only whole parameters have some; halves have none
        if any(not _equal(value, states[step].get(name)) for name, value in small.items()):
            raise unavailable_error(
                rule.name, "a state that does not have the parameter's shape depends on more than itself"
            )
        values = TileValues(results[0][1], numbers[0])
    for name in rule.states:
        expected = states[-1].get(name)
        joined = _join(tile_arrays[name] for tile_arrays in arrays)
        if expected is not None and not torch.equal(joined, expected.reshape(-1).to(torch.float32)):
            raise unavailable_error(rule.name, f"its state {name} is not element-wise")


def _join(pieces: Iterable[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _equal(value: Tensor, expected: Any) -> bool:
    return isinstance(expected, Tensor) and torch.equal(value, expected)


def _numbers_of(rule: TiledRule, state: Mapping[str, Any]) -> dict[str, Scalar]:
    not_small = {k: v for k, v in state.items() if k not in rule.small}
    return {
        k: Scalar.from_value(v)
        for k, v in not_small.items()
        if not (isinstance(v, Tensor) and (v.numel() > 1 or k in rule.states))
    }
