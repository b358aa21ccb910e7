"""The cover: which parameters form a unit, and which modules' calls use it.

Walk from the root. A module whose subtree fits `numel_max` becomes a unit; otherwise its direct
parameters form one and the walk goes on into its children. A ModuleList of like-typed modules
(transformer blocks, experts) is a boundary: each of its children is covered on its own, so a block
is one unit and one expert is one unit. Only a module whose own forward is called can root a unit. A leaf
module is one unit whatever its size. Experts packed into 3-D parameters are a unit that is fetched by rows, or
when somebody touches a parameter of it, but not because its module is called. Parameters that never leave the
device are no part of that: those of the whole model are packed into a few units, in model order.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from offload.sizes import BLOCK_NUMEL, align_up
from zero.params.layout import Layout, UnitContent
from zero.params.leaf_modules import z3_leaf_module
from zero.params.opaque import decoding_names, inner_tensors
from zero.params.quantized_linear import QuantizedLinear
from zero.params.tiles import Tile, can_tile, row_ranges

Kind = tuple[torch.dtype, bool, int]
"""Of a unit: what its parameters are kept in, are they trained, and by which rule."""
PERSISTENT_NUMEL_MAX = 1 << 20
"""Elements of a unit of parameters that never leave the device: edited, reduced and updated as one."""


@dataclass(slots=True)
class Leaf:
    """One parameter object with all its names and all modules that own it."""

    index: int
    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    opaque: bool = False
    """Quantised storage, or what decodes it: bytes whose dtype is not ours to choose."""


class SeparateUnits(nn.ModuleList):
    """A list whose modules are units of their own, also if there is only one: they are called one after the other."""


@dataclass(slots=True)
class CoveredUnit:
    """A unit's content and the modules whose calls are uses of it."""

    content: UnitContent
    scopes: list[nn.Module]
    root: nn.Module
    """The module in whose calls the uses are."""
    tile: Tile | None = None
    """What holds the unit's parameter, where that is some rows of one of the model's."""


@dataclass(frozen=True, slots=True)
class CoverRules:
    """What decides the cover besides the model."""

    numel_max: int | None
    """Explicit: a quarter of `stage3_max_live_parameters`. None: from the model alone."""
    persistence_numel: int
    """Parameters of at most this many elements never leave the device; 0: none."""
    compute_dtype: torch.dtype | None
    """Floating parameters are kept in this dtype; None, and quantised storage: as they are."""
    live_numel_max: int | None = None
    """Explicit `stage3_max_live_parameters`: what is larger is cut into tiles of at most `numel_max`. None: nothing."""
    rule_of: Mapping[int, int] = field(default_factory=dict)
    """id(parameter) -> number of the rule that updates it; 0 for others."""
    whole_rules: frozenset[int] = frozenset()
    """Numbers of those that look at whole parameters."""

    def dtype_of(self, leaf: Leaf, trainable: bool) -> torch.dtype:
        """What a parameter is kept in."""
        p = leaf.parameter
        if self.compute_dtype is None or not p.is_floating_point() or (leaf.opaque and not trainable):
            return p.dtype
        return self.compute_dtype

    def kind_of(self, leaf: Leaf, trainable: Container[int]) -> Kind:
        """Parameters of one kind may share a unit."""
        trained = id(leaf.parameter) in trainable
        return self.dtype_of(leaf, trained), trained, self.rule_of.get(id(leaf.parameter), 0) if trained else 0

    def looks_at_whole(self, kind: Kind) -> bool:
        """True when the rule of such parameters never sees a part of one."""
        return kind[1] and kind[2] in self.whole_rules


def collect_leaves(model: nn.Module) -> list[Leaf]:
    """Every parameter once, in model order, with its tied names and owners; of a wrapper what it wraps."""
    leaves: dict[int, Leaf] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        decoding = decoding_names(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            opaque = name in decoding
            for full_name, tensor in inner_tensors(parameter, f"{module_name}.{name}" if module_name else name):
                leaf = leaves.setdefault(id(tensor), Leaf(len(leaves), cast(nn.Parameter, tensor), opaque=opaque))
                leaf.opaque &= opaque
                if full_name not in leaf.names:
                    leaf.names.append(full_name)
                if all(owner is not module for owner in leaf.owners):
                    leaf.owners.append(module)
    return list(leaves.values())


def coded_numel(leaves: Iterable[Leaf]) -> dict[int, int]:
    """Index of a leaf -> elements that it stands for, of those that are codes or decode them.

    Codes of 4 bits lie two in a byte, and what decodes them is no parameter that anybody has given the model.
    """
    found: dict[int, int] = {}
    for leaf in leaves:
        shape = getattr(getattr(leaf.parameter, "quant_state", None), "shape", None)  # bitsandbytes'
        ours = next((owner for owner in leaf.owners if isinstance(owner, QuantizedLinear)), None)
        if shape is not None:
            found[leaf.index] = math.prod(shape)
        elif ours is not None and leaf.parameter is not ours.bias:
            found[leaf.index] = ours.in_features * ours.out_features if leaf.parameter is ours.packed else 0
    return found


def can_root(module: nn.Module) -> bool:
    """True when the module has a forward of its own that hooks see; ModuleList and the like are only containers."""
    if isinstance(module, torch.jit.ScriptModule):  # its calls inside compiled code run no hook: whoever calls it holds
        return False
    # An instance may have one of its own: what torch.compile(module) returns, say.
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def packed_experts(module: nn.Module) -> int:
    """How many experts the module's own parameters hold along their first dimension; 0 if they hold none so.

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
    taken: set[int] = set()
    persistent: list[Leaf] = []
    units: list[CoveredUnit] = []
    for found in _groups(model, _Place("", model), numel_max):
        group: list[Leaf] = []
        for tensor in (tensor for parameter in found.parameters for _, tensor in inner_tensors(parameter, "")):
            if id(tensor) not in taken:
                taken.add(id(tensor))
                stays = 0 < rules.persistence_numel >= tensor.numel()
                (persistent if stays else group).append(by_id[id(tensor)])
        for leaf in [] if z3_leaf_module(found.root) else _too_large(group, trainable, rules):
            group.remove(leaf)
            units.extend(_tile_units(found, leaf, rules.kind_of(leaf, trainable), rules))
        units.extend(_uniform_units(found, group, trainable, rules))
    return [*_persistent_units(model, persistent, trainable, rules), *units]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk is."""

    name: str
    scope: nn.Module
    """The nearest module here or above that can root."""
    siblings: str = ""
    """The innermost list of like-typed modules around."""


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
    if z3_leaf_module(module) or (fits and not any(_is_apart(child) for child in module.modules())):
        parameters = list(module.parameters())
        if parameters:
            yield _Group(scope, place.name or "root", parameters, place.siblings)
        return
    direct = [p for p in module._parameters.values() if p is not None]
    if direct:
        yield _Group(scope, place.name or "root", direct, place.siblings, packed_experts(module))
    siblings = place.siblings
    if _is_boundary(module):
        # Blocks that hold lists of their own are used in pieces, between those of the lists.
        inner = [child for child in module.modules() if child is not module]
        siblings = "" if any(_is_boundary(child) for child in inner) else place.name or "root"
    for name, child in module.named_children():
        yield from _groups(child, _Place(f"{place.name}.{name}" if place.name else name, scope, siblings), numel_max)


def _is_apart(module: nn.Module) -> bool:
    """True when something below is a unit of its own, so that the modules above cannot be."""
    return z3_leaf_module(module) or _is_boundary(module) or packed_experts(module) > 0


def _is_boundary(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList)
        and len(children) > (0 if isinstance(module, SeparateUnits) else 1)
        and all(type(child) is type(children[0]) for child in children)
        and _subtree_numel(children[0]) > 0
        and can_root(children[0])
    )


def _subtree_numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _uniform_units(
    found: _Group, group: list[Leaf], trainable: Container[int], rules: CoverRules
) -> Iterator[CoveredUnit]:
    """Split a group so that a unit holds one dtype, one trainability and one rule."""
    kinds = _by_kind(group, trainable, rules)
    for kind, members in kinds.items():
        content = UnitContent(
            found.name + ("" if len(kinds) == 1 else f"[{_kind_words(kind)}]"),
            _entries(members),
            *kind[:2],
            persistent=False,
            siblings=found.siblings,
            expert_rows=found.expert_rows,
            rule=kind[2],
            whole=rules.looks_at_whole(kind),
        )
        yield CoveredUnit(content, _scopes(found.root, members), found.root)


def _persistent_units(
    model: nn.Module, leaves: list[Leaf], trainable: Container[int], rules: CoverRules
) -> Iterator[CoveredUnit]:
    """What never leaves the device, packed: one for each module would be mostly padding."""
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
            name = f"persistent {number}[{_kind_words(kind)}]"
            whole = rules.looks_at_whole(kind)
            content = UnitContent(name, _entries(run), *kind[:2], persistent=True, rule=kind[2], whole=whole)
            yield CoveredUnit(content, _scopes(model, run), model)


def _by_kind(leaves: list[Leaf], trainable: Container[int], rules: CoverRules) -> dict[Kind, list[Leaf]]:
    kinds: dict[Kind, list[Leaf]] = {}
    for leaf in leaves:
        kinds.setdefault(rules.kind_of(leaf, trainable), []).append(leaf)
    return kinds


def _entries(leaves: list[Leaf]) -> tuple[tuple[int, tuple[str, ...], torch.Size], ...]:
    return tuple((leaf.index, tuple(leaf.names), leaf.parameter.shape) for leaf in leaves)


def _too_large(group: list[Leaf], trainable: Container[int], rules: CoverRules) -> list[Leaf]:
    """Parameters that have to be tiled, the largest first, so that the rest of the group can be live at once.

    What a rule looks at whole cannot be.
    """
    if rules.live_numel_max is None or rules.live_numel_max < BLOCK_NUMEL:  # no unit is that small
        return []
    numel = sum(leaf.parameter.numel() for leaf in group)
    large: list[Leaf] = []
    for leaf in sorted(group, key=lambda leaf: -leaf.parameter.numel()):
        if align_up(numel, BLOCK_NUMEL) <= rules.live_numel_max:
            break
        whole = leaf.opaque or rules.looks_at_whole(rules.kind_of(leaf, trainable))
        if not whole and can_tile(leaf.parameter, leaf.owners):
            large.append(leaf)
            numel -= leaf.parameter.numel()
    return large


def _tile_units(found: _Group, leaf: Leaf, kind: Kind, rules: CoverRules) -> Iterator[CoveredUnit]:
    rows, width = leaf.parameter.shape
    for begin, end in row_ranges(rows, width, rules.numel_max or rows * width):
        tile = Tile(leaf.parameter, begin, end)
        content = UnitContent(
            f"{leaf.names[0]}[{begin}:{end}]",
            ((leaf.index, tuple(leaf.names), tile.weight.shape),),
            *kind[:2],
            persistent=False,
            siblings=found.siblings,
            first_numel=begin * width,
            rule=kind[2],
        )
        yield CoveredUnit(content, [tile], found.root, tile)


def _kind_words(kind: Kind) -> str:
    dtype, trained, rule = kind
    words = f"{str(dtype).removeprefix('torch.')}+{'trained' if trained else 'frozen'}"
    return f"{words}+rule {rule}" if rule else words


def _scopes(root: nn.Module, members: list[Leaf]) -> list[nn.Module]:
    """The root and every module that owns a parameter of the unit; a tied one may lie elsewhere."""
    scopes = [root]
    for leaf in members:
        for owner in leaf.owners:
            if can_root(owner) and all(owner is not scope for scope in scopes):
                scopes.append(owner)
    return scopes


@dataclass(frozen=True, slots=True)
class Uses:
    """What is in use together, in elements of units that come and go."""

    together: tuple[int, ...]
    """Of each module that roots such units: the sum of them, in model order."""
    around_max: int
    """The most that is in use around another's use: direct parameters of the modules above it."""
    most: int
    """The most that any one use holds with what is around it, and with another one where blocks are recomputed."""

    @classmethod
    def in_turn(cls, layout: Layout, around_max: int = 0) -> Uses:
        """Of units that are used one after the other, inside uses of `around_max` elements."""
        numels = tuple(unit.numel for unit in layout.units if not unit.persistent)
        return cls(numels, around_max, max(numels, default=0) + around_max)


def uses_of(model: nn.Module, covered: list[CoveredUnit], layout: Layout) -> Uses:
    """What has to be on the device together when each module that roots units is called from the ones above it."""
    rooted: dict[nn.Module, int] = {}
    held: dict[nn.Module, int] = {}
    tiles: list[tuple[nn.Module, int]] = []
    for unit, placed in zip(covered, layout.units, strict=True):
        if placed.persistent:
            continue
        if unit.tile is not None:
            tiles.append((unit.root, placed.numel))
            continue
        rooted[unit.root] = rooted.get(unit.root, 0) + placed.numel
        # Packed experts come when somebody asks for rows; the call of their module does not hold them.
        held[unit.root] = held.get(unit.root, 0) + (0 if placed.expert_rows else placed.numel)
    around: dict[nn.Module, int] = {}
    pending = [(model, 0)]
    while pending:
        module, outside = pending.pop()
        if around.get(module, -1) < outside:  # else it is shared, and called from within less here
            around[module] = outside
            pending += [(child, outside + held.get(module, 0)) for child in module.children()]
    uses = [(root, around[root], numel) for root, numel in rooted.items()]
    uses += [(root, around[root] + held.get(root, 0), numel) for root, numel in tiles]
    alone = [outside + numel for _, outside, numel in uses]
    # A block that is recomputed comes again while the backward of its last module holds that one's.
    inside = {module for block in _recomputed_blocks(model) for module in block.modules()}
    again = max((numel for root, _, numel in uses if root in inside), default=0)
    alone += [outside + numel + again for root, outside, numel in uses if root in inside]
    return Uses(
        tuple(numel for _, _, numel in uses),
        max((outside for _, outside, _ in uses), default=0),
        max(alone, default=0),
    )


def _recomputed_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What transformers recomputes: a layer with its flag, or the layers of a model that has the flag for them."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
            is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
            yield from [module] if is_layer or not lists else [layer for each in lists for layer in each]
