"""The cover: one unit a block and an expert, every parameter in exactly one unit, and what the keys change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Block, build
from torch import Tensor, nn

from zero.params.layout import Placement, build_layout
from zero.params.units import CoveredUnit, CoverRules, LiveNumels, can_root, collect_leaves, cover, live_numels


def rules(
    numel_max: int | None = None, persistence_numel: int = 0, dtype: torch.dtype | None = torch.bfloat16
) -> CoverRules:
    return CoverRules(numel_max=numel_max, persistence_numel=persistence_numel, compute_dtype=dtype)


def covered(model: nn.Module, with_rules: CoverRules | None = None, frozen: tuple[str, ...] = ()) -> list[CoveredUnit]:
    leaves = collect_leaves(model)
    trainable = {
        id(leaf.parameter)
        for leaf in leaves
        if leaf.parameter.requires_grad and not any(name.startswith(frozen) for name in leaf.names if frozen)
    }
    return cover(model, leaves, trainable, with_rules or rules())


def names_of(unit: CoveredUnit) -> set[str]:
    return {name for _, names, _ in unit.content.parameters for name in names}


def contents(units: list[CoveredUnit]) -> dict[str, set[str]]:
    return {unit.content.name: names_of(unit) for unit in units}


class Decoder(nn.Module):
    """The tree transformers builds: model.model.layers[i].self_attn.q_proj and so on, and a head outside."""

    class Trunk(nn.Module):
        def __init__(self, layers: int, width: int) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(50, width)
            self.layers = nn.ModuleList(Block(width, 2) for _ in range(layers))
            self.norm = nn.LayerNorm(width)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.model = Decoder.Trunk(layers, width)
        self.lm_head = nn.Linear(width, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


class Experts(nn.Module):
    """A router, experts in a ModuleList, and what they share."""

    def __init__(self, experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0) * self.router(x).mean()


class Mixture(nn.Module):
    """Blocks that each hold experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_transformer_block_is_one_unit() -> None:
    model = Decoder()
    units = covered(model)
    found = contents(units)
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        assert found[prefix] == {f"{prefix}.{name}" for name, _ in layer.named_parameters()}
        unit = next(unit for unit in units if unit.content.name == prefix)
        assert unit.scopes[0] is layer
    assert {"model.embed_tokens", "model.norm", "lm_head"} <= set(found)


def test_experts_with_names_are_units_and_adapters_with_names_are_not() -> None:
    def named(experts: Any) -> nn.ModuleDict:
        return nn.ModuleDict({f"expert_{number}": expert for number, expert in enumerate(experts)})

    model = Mixture()
    for block in model.blocks:
        block.experts = named(block.experts)
    found = contents(covered(model))
    assert {f"blocks.{b}.experts.expert_{e}" for b in range(2) for e in range(4)} <= set(found)
    adapted = Decoder()
    for layer in adapted.model.layers:
        layer.lora = named(nn.Linear(16, 2, bias=False) for _ in range(3))
    assert len(covered(adapted)) == len(covered(Decoder()))


def test_units_come_in_model_order() -> None:
    model = Decoder()
    order = [name for unit in covered(model) for _, (name, *_), _ in unit.content.parameters]
    assert order == [name for name, _ in model.named_parameters()]


def test_each_expert_is_a_unit_and_the_router_is_not_in_any_of_them() -> None:
    found = contents(covered(Mixture()))
    for block in range(2):
        for expert in range(4):
            prefix = f"blocks.{block}.experts.{expert}"
            assert found[prefix] == {f"{prefix}.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
        assert found[f"blocks.{block}.router"] == {
            f"blocks.{block}.router.weight",
            f"blocks.{block}.router.bias",
        }


def test_tied_weights_are_one_slot_with_all_names_used_by_both_modules() -> None:
    model: Any = build("tied")
    units = [unit for unit in covered(model) if "head.weight" in names_of(unit)]
    assert len(units) == 1
    slot = next(names for _, names, _ in units[0].content.parameters if "head.weight" in names)
    assert slot == ("embedding.weight", "head.weight")
    assert any(scope is model.embedding for scope in units[0].scopes)
    assert any(scope is model.head for scope in units[0].scopes)


def test_a_module_under_two_names_is_covered_once_and_keeps_both_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 8)
            self.alias = self.encoder
            self.other = nn.ModuleList([self.encoder, nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            return self.alias(self.encoder(x))

    model = Shared()
    places = Counter(name for unit in covered(model) for name in names_of(unit))
    expected = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(places) == expected and set(places.values()) == {1}
    slots = [names for unit in covered(model) for _, names, _ in unit.content.parameters]
    assert ("encoder.weight", "alias.weight", "other.0.weight") in slots


class Containers(nn.Module):
    """Parameters in every kind of container that has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (3, 5))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.zeros(1))})
        self.parts = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Identity()])
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])])

    def forward(self, x: Tensor) -> Tensor:
        return x


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@pytest.mark.parametrize("numel_max", [None, 0, 1, 20, 50])
def test_containers_never_root_a_unit(numel_max: int | None) -> None:
    model = Containers()
    units = covered(model, rules(numel_max))
    for unit in units:
        assert all(can_root(scope) and not isinstance(scope, CONTAINERS) for scope in unit.scopes)
        if any(name.startswith(("tensors", "named")) for name in names_of(unit)):
            assert unit.scopes[0] is model, "only the model itself is called where these are used"
    assert set().union(*map(names_of, units)) == {name for name, _ in model.named_parameters()}


def test_attention_is_used_as_a_whole_however_it_is_cut() -> None:
    """torch's attention reads its output projection without calling it: the parent's call must count as a use."""
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    attention = model[0]
    for numel_max in (None, 2000, 600, 1):
        units = covered(model, rules(numel_max))
        assert set().union(*map(names_of, units)) == {name for name, _ in model.named_parameters()}
        root = next(unit for unit in units if any(name.endswith("in_proj_weight") for name in names_of(unit)))
        assert any(scope is attention or scope is model for scope in root.scopes)


def test_an_explicit_limit_cuts_blocks_down_to_their_linears() -> None:
    model = Decoder(width=32)
    whole = contents(covered(model))
    fine = contents(covered(model, rules(1)))
    assert "model.layers.0" in whole and "model.layers.0" not in fine
    for part in ("up", "down", "attention.qkv", "attention.out", "norm_in", "norm_mid"):
        name = f"model.layers.0.{part}"
        assert fine[name] == {f"{name}.weight", f"{name}.bias"}


@pytest.mark.parametrize("numel_max", [1, 100, 1_500, 5_000, 13_000, 10**9])
def test_no_unit_that_could_be_cut_is_larger_than_the_explicit_limit(numel_max: int) -> None:
    for unit in covered(Decoder(width=32), rules(numel_max)):
        if sum(shape.numel() for _, _, shape in unit.content.parameters) > numel_max:
            assert len({name.rpartition(".")[0] for name in names_of(unit)}) == 1, "one module's own parameters"


@pytest.mark.parametrize("threshold", [0, 1, 31, 32, 100, 10**9])
def test_parameters_up_to_the_threshold_are_persistent_and_no_others(threshold: int) -> None:
    for unit in covered(build("odd_sizes"), rules(persistence_numel=threshold)):
        for _, _, shape in unit.content.parameters:
            assert unit.content.persistent is (threshold > 0 and shape.numel() <= threshold)


def test_a_unit_holds_one_dtype_one_trainability_and_one_persistence() -> None:
    model: Any = build("mixed")
    model.norm.double()
    model.register_parameter("table", nn.Parameter(torch.zeros(10, dtype=torch.int8), requires_grad=False))
    by_name = dict(model.named_parameters())
    for dtype in (None, torch.bfloat16):
        for unit in covered(model, rules(persistence_numel=50, dtype=dtype)):
            for name in names_of(unit):
                parameter = by_name[name]
                floating = parameter.is_floating_point()
                assert unit.content.dtype == (dtype if dtype is not None and floating else parameter.dtype)
                assert unit.content.trainable is parameter.requires_grad
                assert unit.content.persistent is (parameter.numel() <= 50)


def test_parameters_the_optimizer_does_not_hold_are_not_trained() -> None:
    for unit in covered(Decoder(), frozen=("model.layers.0", "lm_head")):
        frozen = all(name.startswith(("model.layers.0", "lm_head")) for name in names_of(unit))
        assert unit.content.trainable is not frozen


def test_unit_names_are_unique() -> None:
    for name in ("gpt", "tied", "lora", "mixed", "odd_sizes", "structured"):
        for numel_max in (None, 3_000, 1):
            found = [unit.content.name for unit in covered(build(name), rules(numel_max, 40))]
            assert len(found) == len(set(found)), name


def test_unit_names_are_unique_whatever_children_are_called() -> None:
    for threshold, child in ((0, "root"), (4, "persistent 0[bfloat16+trained]")):
        model = build("gpt")
        model.register_parameter("short", nn.Parameter(torch.ones(4)))
        model.add_module(child, nn.Linear(60, 60))
        found = contents(units := covered(model, rules(persistence_numel=threshold)))
        assert len(found) == len(units)
        own = {"position", "short"} if child == "root" else {"short"}
        assert found[child] == own, "what the model has itself keeps the name"
        assert found[f"{child} (2)"] == {f"{child}.weight", f"{child}.bias"}


def test_a_model_without_parameters_has_no_units() -> None:
    assert covered(nn.Sequential(nn.ReLU(), nn.Identity())) == []


def test_a_bare_linear_is_one_unit() -> None:
    model = nn.Linear(3, 3)
    (unit,) = covered(model)
    assert names_of(unit) == {"weight", "bias"} and unit.scopes[0] is model


def uses_under(model: nn.Module, threshold: int, frozen: tuple[str, ...] = ()) -> LiveNumels:
    units = covered(model, rules(persistence_numel=threshold), frozen)
    return live_numels(model, units, build_layout([unit.content for unit in units], Placement()))


def test_what_is_in_use_around_others_is_what_the_modules_above_hold_themselves() -> None:
    uses = uses_under(build("gpt"), 0)
    assert uses.enclosing_max == 4096, "the root's `position` is in use while its blocks are called"
    assert uses.peak == max(uses.per_module[1:]) + 4096


def test_only_what_is_recomputed_comes_a_second_time() -> None:
    """A flag of the whole model means its layers, whose largest is held twice; embedding and head are larger."""
    model: Any = build("gpt", vocab=3_000)
    before = uses_under(model, 0)
    for flagged in (model, model.blocks[0]):
        flagged.gradient_checkpointing = True
        after = uses_under(model, 0)
        flagged.gradient_checkpointing = False
        assert after.peak == before.peak > 96_000
    small: Any = build("gpt")
    before, small.gradient_checkpointing = uses_under(small, 0), True
    assert uses_under(small, 0).peak == before.enclosing_max + 2 * max(before.per_module)


@pytest.mark.parametrize("threshold", [0, 40, 100_000])
@pytest.mark.parametrize("frozen", [(), ("blocks.0.norm.weight", "blocks.1.norm.weight")], ids=["trained", "mixed"])
def test_a_block_of_several_units_is_around_no_other(threshold: int, frozen: tuple[str, ...]) -> None:
    """Norms that stay, and frozen parts beside trained ones, are used with their block: nothing encloses it."""
    model = Blocks()
    uses = uses_under(model, threshold, frozen)
    assert uses.enclosing_max == 0
    assert uses.peak == max(uses.per_module, default=0)
    assert len(uses.per_module) == (len(model.blocks) if threshold < 1_000 else 0)


class Blocks(nn.Module):
    """Nothing but blocks: the root owns no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# ---- any tree ---------------------------------------------------------------------------------


class Node(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OtherNode(Node):
    pass


KINDS = [Node, OtherNode, nn.ModuleList, nn.ModuleDict, nn.Sequential]


@st.composite
def trees(draw: Any, depth: int = 3, pool: list[nn.Parameter] | None = None) -> nn.Module:
    """A random module tree; parameters and modules may be shared."""
    pool = [] if pool is None else pool
    kind = draw(st.sampled_from(KINDS if depth < 3 else KINDS[:2]))
    module = kind()
    children = [draw(trees(depth=depth - 1, pool=pool)) for _ in range(draw(st.integers(0, 3)))] if depth else []
    if children and draw(st.booleans()):
        children.append(children[0])
    for index, child in enumerate(children):
        module.add_module(str(index), child)
    for index in range(draw(st.integers(0, 2))):
        if pool and draw(st.integers(0, 3)) == 0:
            parameter = draw(st.sampled_from(pool))
        else:
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
            parameter = nn.Parameter(
                torch.empty(draw(st.integers(0, 30)), dtype=dtype), requires_grad=draw(st.booleans())
            )
            pool.append(parameter)
        module.register_parameter(f"p{index}", parameter)
    module.register_parameter("absent", None)
    return module


@settings(max_examples=150, deadline=None)
@given(trees(), st.one_of(st.none(), st.integers(0, 100)), st.integers(0, 20), st.sampled_from([None, torch.bfloat16]))
def test_each_parameter_of_any_tree_is_in_exactly_one_unit(
    model: nn.Module, numel_max: int | None, persistence: int, dtype: torch.dtype | None
) -> None:
    units = covered(model, rules(numel_max, persistence, dtype))
    leaves = collect_leaves(model)
    placed = [index for unit in units for index, _, _ in unit.content.parameters]
    assert sorted(placed) == list(range(len(leaves)))
    assert len({id(leaf.parameter) for leaf in leaves}) == len(leaves)
    names = [name for unit in units for name in names_of(unit)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    for unit in units:
        assert unit.content.parameters
        assert unit.scopes and all(can_root(scope) for scope in unit.scopes)
        assert len({id(scope) for scope in unit.scopes}) == len(unit.scopes)
        for index, _, shape in unit.content.parameters:
            leaf = leaves[index]
            assert leaf.parameter.shape == shape
            for owner in filter(can_root, leaf.owners):
                inside = any(module is owner for scope in unit.scopes for module in scope.modules())
                assert inside, "a call of some scope must enclose every use of the parameter"


@settings(max_examples=60, deadline=None)
@given(trees(), st.one_of(st.none(), st.integers(0, 100)))
def test_the_cover_depends_on_the_tree_alone(model: nn.Module, numel_max: int | None) -> None:
    first, second = covered(model, rules(numel_max)), covered(model, rules(numel_max))
    assert [unit.content for unit in first] == [unit.content for unit in second]
