"""The cover: which parameters form a unit, and which modules' calls use it.

The walk starts at the root. A module whose subtree fits `numel_max` becomes a unit; otherwise its direct parameters
form a unit and the walk continues in its children. A ModuleList of modules of one type (transformer blocks, experts),
or a ModuleDict of such that have children themselves, is a boundary: each of its children is covered on its own, so one
block is one unit and one expert is one unit. Only a module whose own forward is called can root a unit. A leaf module
is one unit, independently of its size. Experts packed into 3-D parameters form a unit that is fetched by rows, or when
a parameter of it is used directly, but not when its module is called. Parameters that never leave the device are not
part of these units: they are packed into a few units for the whole model, in model order.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import nn

from offload.sizes import BLOCK_NUMEL, align_up
from zero.params.layout import Layout, UnitContent
from zero.params.leaf_modules import z3_leaf_module
from zero.params.quantized_weights import QuantizedLinear, inner_tensors, quantized_tensor_names
from zero.params.tiles import Tile, can_tile, row_ranges

Kind = tuple[torch.dtype, bool, int]
"""(dtype in which a unit's parameters are kept, whether they are trained, number of their rule)."""
PERSISTENT_NUMEL_MAX = 1 << 20
"""Largest number of elements of a persistent unit, which is edited, reduced and updated as one."""


@dataclass(slots=True)
class Leaf:
    """One parameter object with all its names and all modules that own it."""

    index: int
    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    is_quantized: bool = False
    """Quantised codes, or a tensor that decodes them: its dtype must not be changed."""


class SeparateUnits(nn.ModuleList):
    """A list whose modules become separate units, even if there is only one: they are called one after the other."""


@dataclass(slots=True)
class CoveredUnit:
    """A unit's content and the modules whose calls are uses of it."""

    content: UnitContent
    scopes: list[nn.Module]
    root: nn.Module
    """The module whose calls contain the uses."""
    tile: Tile | None = None
    """The tile that holds the unit's parameter, if that is some rows of a model's parameter."""


@dataclass(frozen=True, slots=True)
class CoverRules:
    """The inputs of the cover besides the model."""

    numel_max: int | None
    """A quarter of `stage3_max_live_parameters`, if that is set. None: derived from the model alone."""
    persistence_numel: int
    """Parameters of at most this many elements never leave the device; 0: none."""
    compute_dtype: torch.dtype | None
    """Floating parameters are kept in this dtype. None: they keep their own, as quantised storage always does."""
    live_numel_max: int | None = None
    """`stage3_max_live_parameters`, if set: what is larger is cut into tiles of at most `numel_max`. None: no tiles."""
    rule_of: Mapping[int, int] = field(default_factory=dict)
    """id(parameter) -> number of the rule that updates it; 0 for others."""
    whole_parameter_rules: frozenset[int] = frozenset()
    """Numbers of the rules that need whole parameters."""

    def dtype_of(self, leaf: Leaf, trainable: bool) -> torch.dtype:
        """The dtype in which a parameter is kept."""
        p = leaf.parameter
        if self.compute_dtype is None or not p.is_floating_point() or (leaf.is_quantized and not trainable):
            return p.dtype
        return self.compute_dtype

    def kind_of(self, leaf: Leaf, trainable: Container[int]) -> Kind:
        """Parameters of one kind may share a unit."""
        trained = id(leaf.parameter) in trainable
        return self.dtype_of(leaf, trained), trained, self.rule_of.get(id(leaf.parameter), 0) if trained else 0

    def needs_whole_parameters(self, kind: Kind) -> bool:
        """True if the rule of such parameters needs whole parameters."""
        return kind[1] and kind[2] in self.whole_parameter_rules


def collect_leaves(model: nn.Module) -> list[Leaf]:
    """Every parameter once, in model order, with all names and owners; a wrapper is replaced by its inner tensors."""
    leaves: dict[int, Leaf] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        decoding = quantized_tensor_names(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            opaque = name in decoding
            for full_name, tensor in inner_tensors(parameter, f"{module_name}.{name}" if module_name else name):
                leaf = leaves.setdefault(id(tensor), Leaf(len(leaves), cast(nn.Parameter, tensor), is_quantized=opaque))
                leaf.is_quantized &= opaque
                if full_name not in leaf.names:
                    leaf.names.append(full_name)
                if all(owner is not module for owner in leaf.owners):
                    leaf.owners.append(module)
    return list(leaves.values())


def coded_numel(leaves: Iterable[Leaf]) -> dict[int, int]:
    """Index of each leaf of quantised storage -> number of weight elements that it stands for.

    A byte may hold two codes of 4 bits. Tensors that decode codes stand for 0 elements: the model was not given them.
    """
    numels: dict[int, int] = {}
    for leaf in leaves:
        shape = getattr(getattr(leaf.parameter, "quant_state", None), "shape", None)  # bitsandbytes'
        linear = next((owner for owner in leaf.owners if isinstance(owner, QuantizedLinear)), None)
        if shape is not None:
            numels[leaf.index] = math.prod(shape)
        elif linear is not None and leaf.parameter is not linear.bias:
            numels[leaf.index] = linear.in_features * linear.out_features if leaf.parameter is linear.packed else 0
    return numels


def can_root(module: nn.Module) -> bool:
    """True if the module has its own forward, whose calls run hooks; ModuleList and the like are only containers."""
    if isinstance(module, torch.jit.ScriptModule):  # calls in compiled code run no hooks: its caller holds its weights
        return False
    # An instance may have its own forward, for example the result of torch.compile(module).
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def packed_experts(module: nn.Module) -> int:
    """Number of experts along the first dimension of the module's own parameters; 0 if they are not packed experts.

    Transformers keeps all experts of a layer in a few 3-D parameters, `gate_up_proj` [experts, ...] and so on.
    """
    count = getattr(module, "num_experts", None)
    own = [p for p in module._parameters.values() if p is not None]
    if not isinstance(count, int) or count < 2 or not any(p.dim() == 3 for p in own):
        return 0
    return count if all(p.dim() > 1 and p.shape[0] == count for p in own) else 0


def derived_numel_max(model: nn.Module) -> int:
    """Unit size when no key gives one: the largest repeated block, and at least an eighth of the model."""
    total = _subtree_numel(model)
    blocks = [
        _subtree_numel(child) for parent in model.modules() if _is_boundary(parent) for child in parent.children()
    ]
    return max([total // 8, *blocks])


def cover(model: nn.Module, leaves: list[Leaf], trainable: Container[int], rules: CoverRules) -> list[CoveredUnit]:
    """Cut the model into units.

    Args:
        model: the module tree.
        leaves: from `collect_leaves(model)`.
        trainable: ids of the parameters that the optimizer updates.
        rules: sizes and dtypes that decide where the cuts are.
    """
    numel_max = derived_numel_max(model)
    if rules.numel_max is not None:
        numel_max = min(numel_max, rules.numel_max)
    by_id = {id(leaf.parameter): leaf for leaf in leaves}
    covered_ids: set[int] = set()
    persistent: list[Leaf] = []
    units: list[CoveredUnit] = []
    for group in _groups(model, _Place("", model), numel_max):
        members: list[Leaf] = []
        for tensor in (tensor for parameter in group.parameters for _, tensor in inner_tensors(parameter, "")):
            if id(tensor) not in covered_ids:
                covered_ids.add(id(tensor))
                is_persistent = 0 < rules.persistence_numel >= tensor.numel()
                (persistent if is_persistent else members).append(by_id[id(tensor)])
        for leaf in [] if z3_leaf_module(group.root) else _leaves_to_tile(members, trainable, rules):
            members.remove(leaf)
            units.extend(_tile_units(group, leaf, rules.kind_of(leaf, trainable), rules))
        units.extend(_uniform_units(group, members, trainable, rules))
    return _with_unique_names([*_persistent_units(model, persistent, trainable, rules), *units])


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of the walk."""

    name: str
    scope: nn.Module
    """The nearest module, here or above, that can root a unit."""
    siblings: str = ""
    """The innermost enclosing list of modules of one type."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that move together, if their kinds allow it."""

    root: nn.Module
    name: str
    parameters: list[nn.Parameter]
    siblings: str
    expert_rows: int = 0


def _groups(module: nn.Module, place: _Place, numel_max: int) -> Iterator[_Group]:
    """The groups of a subtree, in model order."""
    scope = module if can_root(module) else place.scope
    fits = can_root(module) and _subtree_numel(module) <= numel_max
    if z3_leaf_module(module) or (fits and not any(_needs_own_unit(child) for child in module.modules())):
        parameters = list(module.parameters())
        if parameters:
            yield _Group(scope, place.name or "root", parameters, place.siblings)
        return
    direct = [p for p in module._parameters.values() if p is not None]
    if direct:
        yield _Group(scope, place.name or "root", direct, place.siblings, packed_experts(module))
    siblings = place.siblings
    if _is_boundary(module):
        # Blocks that contain lists are used in parts, between units of these lists, so they are no siblings.
        inner = [child for child in module.modules() if child is not module]
        siblings = "" if any(_is_boundary(child) for child in inner) else place.name or "root"
    for name, child in module.named_children():
        yield from _groups(child, _Place(f"{place.name}.{name}" if place.name else name, scope, siblings), numel_max)


def _needs_own_unit(module: nn.Module) -> bool:
    """True if a part of this module must be a separate unit, so that modules above cannot be one unit."""
    return z3_leaf_module(module) or _is_boundary(module) or packed_experts(module) > 0


def _is_boundary(module: nn.Module) -> bool:
    children = list(module.children())
    # Some models name their experts. The adapters of a layer have names too, but each is a single layer.
    named = isinstance(module, nn.ModuleDict) and all(next(child.children(), None) is not None for child in children)
    return (
        (named or isinstance(module, nn.ModuleList))
        and len(children) > (0 if isinstance(module, SeparateUnits) else 1)
        and all(type(child) is type(children[0]) for child in children)
        and _subtree_numel(children[0]) > 0
        and can_root(children[0])
    )


def _subtree_numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _uniform_units(
    group: _Group, leaves: list[Leaf], trainable: Container[int], rules: CoverRules
) -> Iterator[CoveredUnit]:
    """Split a group so that a unit holds one dtype, one trainability and one rule."""
    kinds = _by_kind(leaves, trainable, rules)
    for kind, members in kinds.items():
        content = UnitContent(
            group.name + ("" if len(kinds) == 1 else f"[{_describe_kind(kind)}]"),
            _entries(members),
            *kind[:2],
            persistent=False,
            sibling_group=group.siblings,
            expert_rows=group.expert_rows,
            rule=kind[2],
            needs_whole_parameters=rules.needs_whole_parameters(kind),
        )
        yield CoveredUnit(content, _scopes(group.root, members), group.root)


def _persistent_units(
    model: nn.Module, leaves: list[Leaf], trainable: Container[int], rules: CoverRules
) -> Iterator[CoveredUnit]:
    """Pack the parameters that never leave the device: a unit for each module would be mostly padding."""
    for kind, members in _by_kind(leaves, trainable, rules).items():
        runs: list[list[Leaf]] = [[]]
        numel = 0
        for leaf in members:
            numel += leaf.parameter.numel()
            if runs[-1] and numel > PERSISTENT_NUMEL_MAX:
                runs.append([])
                numel = leaf.parameter.numel()
            runs[-1].append(leaf)
        for number, run in enumerate(runs):
            name = f"persistent {number}[{_describe_kind(kind)}]"
            needs_whole = rules.needs_whole_parameters(kind)
            content = UnitContent(
                name, _entries(run), *kind[:2], persistent=True, rule=kind[2], needs_whole_parameters=needs_whole
            )
            yield CoveredUnit(content, _scopes(model, run), model)


def _with_unique_names(units: list[CoveredUnit]) -> list[CoveredUnit]:
    """The same units; where an earlier one has the name of a later one, the later one's gets a number.

    Checkpoints and statistics find units by name. The top module's unit is "root", and a child may be called that too.
    """
    names: set[str] = set()
    for unit in units:
        name, number = unit.content.name, 2
        while name in names:
            name, number = f"{unit.content.name} ({number})", number + 1
        names.add(name)
        unit.content = replace(unit.content, name=name)
    return units


def _by_kind(leaves: list[Leaf], trainable: Container[int], rules: CoverRules) -> dict[Kind, list[Leaf]]:
    kinds: dict[Kind, list[Leaf]] = {}
    for leaf in leaves:
        kinds.setdefault(rules.kind_of(leaf, trainable), []).append(leaf)
    return kinds


def _entries(leaves: list[Leaf]) -> tuple[tuple[int, tuple[str, ...], torch.Size], ...]:
    return tuple((leaf.index, tuple(leaf.names), leaf.parameter.shape) for leaf in leaves)


def _leaves_to_tile(leaves: list[Leaf], trainable: Container[int], rules: CoverRules) -> list[Leaf]:
    """Parameters that have to be tiled, the largest first, so that the others can be live at once.

    A parameter whose rule needs it whole cannot be tiled.
    """
    if rules.live_numel_max is None or rules.live_numel_max < BLOCK_NUMEL:  # no unit can be that small
        return []
    numel = sum(leaf.parameter.numel() for leaf in leaves)
    large: list[Leaf] = []
    for leaf in sorted(leaves, key=lambda leaf: -leaf.parameter.numel()):
        if align_up(numel, BLOCK_NUMEL) <= rules.live_numel_max:
            break
        needs_whole = leaf.is_quantized or rules.needs_whole_parameters(rules.kind_of(leaf, trainable))
        if not needs_whole and can_tile(leaf.parameter, leaf.owners):
            large.append(leaf)
            numel -= leaf.parameter.numel()
    return large


def _tile_units(group: _Group, leaf: Leaf, kind: Kind, rules: CoverRules) -> Iterator[CoveredUnit]:
    rows, width = leaf.parameter.shape
    for begin, end in row_ranges(rows, width, rules.numel_max or rows * width):
        tile = Tile(leaf.parameter, begin, end)
        content = UnitContent(
            f"{leaf.names[0]}[{begin}:{end}]",
            ((leaf.index, tuple(leaf.names), tile.weight.shape),),
            *kind[:2],
            persistent=False,
            sibling_group=group.siblings,
            first_numel=begin * width,
            rule=kind[2],
        )
        yield CoveredUnit(content, [tile], group.root, tile)


def _describe_kind(kind: Kind) -> str:
    dtype, trained, rule = kind
    words = f"{str(dtype).removeprefix('torch.')}+{'trained' if trained else 'frozen'}"
    return f"{words}+rule {rule}" if rule else words


def _scopes(root: nn.Module, members: list[Leaf]) -> list[nn.Module]:
    """The root and every module that owns a parameter of the unit; the owner of a tied one may be elsewhere."""
    scopes = {id(root): root}
    for leaf in members:
        scopes.update({id(owner): owner for owner in leaf.owners if can_root(owner)})
    return list(scopes.values())


@dataclass(frozen=True, slots=True)
class LiveNumels:
    """Elements that are in use at the same time. Persistent units are not counted."""

    per_module: tuple[int, ...]
    """For each module that roots such units: their sum, in model order."""
    enclosing_max: int
    """The most elements in use around another use: direct parameters of the modules above it."""
    peak: int
    """The most elements of one use and the uses around it, plus a second use if blocks are recomputed."""

    @classmethod
    def for_sequential_use(cls, layout: Layout, enclosing_max: int = 0) -> LiveNumels:
        """The uses of units that are used one after the other, inside uses of `enclosing_max` elements."""
        numels = tuple(unit.numel for unit in layout.units if not unit.persistent)
        return cls(numels, enclosing_max, max(numels, default=0) + enclosing_max)


def live_numels(model: nn.Module, covered: list[CoveredUnit], layout: Layout) -> LiveNumels:
    """Elements that must be on the device together when each module that roots units is called by modules above it."""
    rooted: dict[nn.Module, int] = {}
    call_numels: dict[nn.Module, int] = {}
    tiles: list[tuple[nn.Module, int]] = []
    for unit, placed in zip(covered, layout.units, strict=True):
        if placed.persistent:
            continue
        if unit.tile is not None:
            tiles.append((unit.root, placed.numel))
            continue
        rooted[unit.root] = rooted.get(unit.root, 0) + placed.numel
        # Packed experts are fetched when rows are asked for; their module's call does not keep them on the device.
        call_numels[unit.root] = call_numels.get(unit.root, 0) + (0 if placed.expert_rows else placed.numel)
    around: dict[nn.Module, int] = {}
    pending = [(model, 0)]
    while pending:
        module, outside = pending.pop()
        if around.get(module, -1) < outside:  # else it is shared, and was visited with more around it
            around[module] = outside
            pending += [(child, outside + call_numels.get(module, 0)) for child in module.children()]
    uses = [(root, around[root], numel) for root, numel in rooted.items()]
    uses += [(root, around[root] + call_numels.get(root, 0), numel) for root, numel in tiles]
    peaks = [outside + numel for _, outside, numel in uses]
    # A recomputed block is fetched again while the backward of its last module still holds that module's units.
    inside = {module for block in _recomputed_blocks(model) for module in block.modules()}
    recomputed_numel = max((numel for root, _, numel in uses if root in inside), default=0)
    peaks += [outside + numel + recomputed_numel for root, outside, numel in uses if root in inside]
    return LiveNumels(
        tuple(numel for _, _, numel in uses),
        max((outside for _, outside, _ in uses), default=0),
        max(peaks, default=0),
    )


def _recomputed_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Blocks that transformers recomputes: a layer with the flag, or all layers of a model with the flag."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
            is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
            yield from [module] if is_layer or not lists else [layer for each in lists for layer in each]
