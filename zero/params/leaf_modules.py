"""Leaf modules, under DeepSpeed's names: all parameters below such a module are fetched together.

Mixtures of experts do not need this: each expert is a unit of its own, and only experts that are called are fetched. A
flag takes effect when `zero.initialize` makes the units; a later change takes effect in the next engine.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence

from torch import nn

from offload.errors import ConfigError
from zero.config.zero_block import DEEPSPEED_LEAF_CLASSES, LeafModuleConfig

logger = logging.getLogger("zero")

FLAG = "_z3_leaf"
OWNER = "ds_z3_leaf_module"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules whose own forward may never be called."""
FINE_NUMEL_MAX = 10**9
"""Larger modules never become leaves, even if they are fine: all of a leaf is live at once."""


def z3_leaf_module(model: nn.Module) -> bool:
    """True if the module itself is flagged."""
    return bool(getattr(model, FLAG, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """True if an engine has found the parameter inside a leaf module."""
    return hasattr(model, OWNER)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The flagged modules of a tree, the root included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flag one module, or remove its flag."""
    setattr(model, FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flag every module of these classes, so that each is fetched as one unit with all its submodules.

    Args:
        model: the tree.
        leaf_module_classes: classes (subclasses count), or their names, bare or fully qualified.
        raise_if_not_found: raise if no module has any of these classes.

    Returns:
        The modules.

    Raises:
        TypeError: an entry is neither a class nor a name.
        ValueError: nothing was found; names the classes.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the flag; as `set_z3_leaf_modules`."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag modules by their names in `named_modules()`.

    Returns:
        (the modules, the names that no module has).

    Raises:
        ValueError: no module has one of the names.
    """
    return _flag_words(model, module_names, flag, raise_if_not_found, "named", operator.eq)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag modules whose name in `named_modules()` ends in one of the suffixes; as `set_z3_leaf_modules_by_name`."""
    return _flag_words(model, module_name_suffixes, flag, raise_if_not_found, "whose name ends in", str.endswith)


def apply_zero_leaf_module_config(model: nn.Module, config: LeafModuleConfig | None) -> list[nn.Module]:
    """Flag the modules that `zero_optimization.leaf_module` names.

    A list of classes is often written for several architectures, so one class that is found is enough; every name and
    every suffix must be found. DeepSpeed's default classes may all be missing, since a dumped config lists them.

    Returns:
        The modules, each once.

    Raises:
        ConfigError: something was not found.
    """
    if config is None:
        return []
    key = "zero_optimization.leaf_module"
    modules = _flag_classes(model, config.classes, True, raise_if_not_found=False) if config.classes else []
    if not modules and set(config.classes) - set(DEEPSPEED_LEAF_CLASSES):
        raise ConfigError(f"{key}.classes: {_nothing_found('of the classes', list(config.classes), model)}")
    for name, words, phrase, matches in (
        ("names", config.names, "named", operator.eq),
        ("name_suffixes", config.name_suffixes, "whose name ends in", str.endswith),
    ):
        named_modules, missing = _flag_words(model, words, True, False, phrase, matches)
        if missing:
            raise ConfigError(f"{key}.{name}: {_nothing_found(phrase, missing, model)}")
        modules += named_modules
    return list(dict.fromkeys(modules))


def flag_fine_modules(model: nn.Module, granularity_numel: int) -> list[nn.Module]:
    """Flag modules that consist of many small ones, for `zero_optimization.stage3_module_granularity_threshold`.

    The granularity of a module is the mean number of parameter elements over the modules inside it that have any,
    including itself but no containers. Outer modules are checked first; modules inside a flagged one need no flag.
    Containers, modules without submodules and modules above `FINE_NUMEL_MAX` are never flagged.

    Args:
        model: the tree.
        granularity_numel: [elements] a module of at most this granularity is fine; 0: none is.

    Returns:
        The modules that were flagged.
    """
    if granularity_numel <= 0:
        return []
    flagged: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop()
        granularity = _granularity_numel(module)
        if granularity is not None and granularity <= granularity_numel:
            set_z3_leaf_module(module, True)
            flagged.append(module)
        else:
            pending += reversed(list(module.children()))
    if not flagged:
        known = [(_granularity_numel(module), name) for name, module in model.named_modules()]
        finest, name = min(((numel, name) for numel, name in known if numel is not None), default=(None, ""))
        logger.warning(
            "zero_optimization.stage3_module_granularity_threshold: no module has at most %d elements per inner "
            "module%s",
            granularity_numel,
            "" if finest is None else f"; the least is {finest}, in {name or type(model).__name__}",
        )
    return flagged


def _granularity_numel(module: nn.Module) -> int | None:
    """See `flag_fine_modules`; None for a module that is never flagged."""
    modules_count, numel = _measure(module)
    if type(module) in CONTAINERS or not any(True for _ in module.children()):
        return None
    return None if numel == 0 or numel > FINE_NUMEL_MAX else numel // modules_count


def _measure(module: nn.Module) -> tuple[int, int]:
    """(number of modules with parameters, including itself but no containers; elements of all parameters)."""
    numel = sum(p.numel() for p in module.parameters(recurse=False))
    below = [_measure(child) for child in module.children()]
    modules_count, inner_numel = sum(count for count, _ in below), sum(numel for _, numel in below)
    numel += inner_numel
    return modules_count + (numel > 0 and type(module) not in CONTAINERS), numel


def mark_leaf_parameters(model: nn.Module) -> None:
    """Set an attribute on every parameter inside leaf modules: the outermost of them, under DeepSpeed's name."""
    for parameter in model.parameters():
        parameter.__dict__.pop(OWNER, None)
    for module in get_z3_leaf_modules(model):
        for parameter in module.parameters():
            parameter.__dict__.setdefault(OWNER, module)


def _flag_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    entries = [classes] if isinstance(classes, (type, str)) else list(classes)
    wrong = [entry for entry in entries if not isinstance(entry, (type, str))]
    if wrong:
        raise TypeError(f"leaf_module_classes: expected classes or names of classes, got {wrong}")
    modules = [module for module in model.modules() if any(_matches_class(module, entry) for entry in entries)]
    if not modules and raise_if_not_found:
        names = [entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}" for entry in entries]
        raise ValueError(_nothing_found("of the classes", names, model))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _flag_words(
    model: nn.Module,
    words: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    phrase: str,
    matches: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    modules: list[nn.Module] = []
    missing: list[str] = []
    for word in words:
        matching = [module for name, module in named if matches(name, word)]
        modules += matching
        if not matching:
            missing.append(word)
    if missing and raise_if_not_found:
        raise ValueError(_nothing_found(phrase, missing, model))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return list(dict.fromkeys(modules)), missing


def _matches_class(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _nothing_found(phrase: str, wanted: list[str], model: nn.Module) -> str:
    """A message with the names that were searched for, and those that exist."""
    if phrase == "of the classes":
        there = sorted({type(module).__name__ for module in model.modules()})
    else:
        there = [name for name, _ in model.named_modules() if name]
    shown = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
    return f"{type(model).__name__} has no module {phrase} {', '.join(wanted)}; it has {shown}"
