"""Parameters larger than the live limit: tiled by rows, trained like the whole, with their own name and shape."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, WIDTH, make_config, seeded, trainability
from reference import Reference, differences, snapshot
from tiled import LIMIT, ROWS, STEPS, config_for, hyper_of, in_tiles, inputs, train, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from offload.errors import StateError
from zero.params.tiles import Tile, row_ranges

Open = Callable[..., Any]
PAIRS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme")]


class Spread(nn.Module):
    """An embedding that no gradient passes and a table behind it: every sum is the one without tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.first = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(self.table(ids)).float().square().mean()


class OverWide(nn.Module):
    """A Linear with many outputs on an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, ROWS)
        self.last = nn.Parameter(torch.randn(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x.to(self.up.weight.dtype)) * self.last).float().square().mean()


@pytest.mark.parametrize("kind", [Spread, OverWide])
@pytest.mark.parametrize(("pair", "bf16"), [*((pair, True) for pair in PAIRS), (("nvme", "nvme"), False)])
def test_rows_in_tiles_train_bit_for_bit_like_the_whole(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], kind: Any, bf16: bool
) -> None:
    with seeded(1):
        model = kind()
    plain, names = copy.deepcopy(model), trainability(model)
    engine = open_engine(model, config_for(pair, nvme_path, bf16=bf16))
    reference = Reference(plain, hyper_of(engine), bf16=bf16)
    assert train(engine, model) == train(reference, plain)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert 0 < engine.statistics().live_numel_peak <= LIMIT


@pytest.mark.parametrize(
    ("pair", "recompute"),
    [*((pair, None) for pair in PAIRS), (("nvme", "nvme"), "reentrant"), (("cpu", "cpu"), "nonreentrant")],
)
def test_a_head_and_an_embedding_in_tiles_equal_plain_torch_that_adds_in_the_same_order(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], recompute: str | None
) -> None:
    model = wide(recompute=recompute)
    plain, names = in_tiles(copy.deepcopy(model)), trainability(model)
    engine = open_engine(model, config_for(pair, nvme_path))
    reference = Reference(plain, hyper_of(engine))
    assert train(engine, model) == train(reference, plain)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    statistics = engine.statistics()
    assert 0 < statistics.live_numel_peak <= LIMIT
    tiles = [name for name in statistics.releases_by_unit if name.startswith("head.weight[")]
    assert len(tiles) == len(row_ranges(ROWS, WIDTH, LIMIT // 4)) > ROWS * WIDTH / LIMIT


@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_a_tied_head_shares_the_tiles_of_its_embedding(open_engine: Open, nvme_path: Any, pair: Any) -> None:
    model = wide(tied=True)
    names = trainability(model)
    plain = in_tiles(copy.deepcopy(model))
    engine = open_engine(model, config_for(pair, nvme_path, bf16=False))
    reference = Reference(plain, hyper_of(engine), bf16=False)
    ours, theirs = train(engine, model), train(reference, plain)
    # The tied gradient adds the same two parts, tile by tile.
    assert ours == theirs
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert 0 < engine.statistics().live_numel_peak <= LIMIT


def test_the_gradient_of_a_tiled_heads_input_is_within_the_rounding_of_its_partial_sums(
    open_engine: Open, nvme_path: Any
) -> None:
    """fp32: n tiles round n - 1 more times; |error| <= n eps |g| |W|, summed over the rows."""
    with seeded(2):
        layer = nn.Linear(WIDTH, ROWS, bias=False)
    weight, grad = layer.weight.detach().clone(), torch.randn(16, ROWS)
    whole = (grad.double() @ weight.double()).float()
    engine = open_engine(layer, config_for(("cpu", "cpu"), nvme_path, bf16=False))
    x = torch.randn(16, WIDTH, requires_grad=True)
    engine.backward((engine(x) * grad).sum(), scale_wrt_gas=False)
    bound = (grad.abs() @ weight.abs()) * (ROWS + len(engine.units)) * torch.finfo(torch.float32).eps
    assert x.grad is not None and torch.all((x.grad - whole).abs() <= bound)


def test_names_shapes_and_state_dict_keys_stay_the_models(open_engine: Open, nvme_path: Any) -> None:
    model = wide()
    before = {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    parameter = model.head.weight
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(engine, model, 1)
    assert {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(before)
    assert [name for name, _ in model.named_modules()] == modules
    assert model.head.weight is parameter and isinstance(parameter, nn.Parameter)
    assert (parameter.numel(), parameter.dtype) == (ROWS * WIDTH, torch.bfloat16)
    assert sorted(dict(engine.named_full_parameters())) == sorted(before)
    assert engine.full_master("head.weight").shape == (ROWS, WIDTH)


def test_edits_inside_gathered_parameters_reach_the_tiles(open_engine: Open, nvme_path: Any) -> None:
    model = wide()
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(engine, model, 1)
    held = engine.full_parameter("embedding.weight")
    weight = model.embedding.weight
    with zero.GatheredParameters([weight]), zero.GatheredParameters(weight):
        assert torch.equal(weight, held) and type(weight) is nn.Parameter
        with torch.no_grad():
            weight[[0, 1_500, 2_999]] = 2.0
    held[[0, 1_500, 2_999]] = 2.0
    assert torch.equal(engine.full_parameter("embedding.weight"), held)
    train(engine, model, 1)


def test_a_tiled_weight_takes_new_data_however_it_lies_or_refuses_it_and_goes_on(
    open_engine: Open, nvme_path: Any
) -> None:
    model = wide()
    engine = open_engine(model, config_for(("cpu", "cpu"), nvme_path))
    weight = model.embedding.weight
    given = torch.randn(WIDTH, ROWS).to(torch.bfloat16)
    with zero.GatheredParameters([weight]):
        weight.data = given.t()
    assert torch.equal(engine.full_parameter("embedding.weight"), given.t())
    gathered = zero.GatheredParameters([weight])
    with pytest.raises(StateError, match=r"its shape was \(3000, 32\) and is \(32, 3000\)"), gathered:
        weight.data = given
    assert torch.equal(engine.full_parameter("embedding.weight"), given.t()) and weight.shape == (ROWS, WIDTH)
    train(engine, model, 1)


def test_another_engine_takes_a_tiled_model_over(open_engine: Open, nvme_path: Any) -> None:
    model = wide()
    names = trainability(model)
    first = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(first, model, 1)
    held = {name: first.full_master(name) for name, _ in names}
    second = open_engine(model, config_for(("cpu", "cpu"), nvme_path, zero={"stage3_max_live_parameters": 10**9}))
    assert all(torch.equal(second.full_master(name), held[name]) for name, _ in names)
    assert not [unit.name for unit in second.units if "[0:" in unit.name]
    train(second, model, 1)


def test_a_failed_initialisation_gives_a_tiled_model_back(nvme_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero.assembly.engine_parts import EngineParts

    model = wide()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fail(self: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(EngineParts, "install", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        zero.initialize(model=model, config=config_for(("nvme", "nvme"), nvme_path))
    after = dict(model.named_parameters())
    assert all(type(after[name]) is nn.Parameter and torch.equal(after[name], value) for name, value in before.items())


class Scaled(nn.Embedding):
    """As some models have it: a subclass that scales what the table gives."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Borrowing(nn.Module):
    """The head is F.linear on another module's weight, inside a checkpoint if asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.table, self.mix, self.reentrant = Scaled(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.table(ids))
        logits = self.head(x) if self.reentrant is None else checkpoint(self.head, x, use_reentrant=self.reentrant)
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_subclasses_borrowed_weights_and_checkpoints_around_a_tiled_call_train(
    open_engine: Open, nvme_path: Any, reentrant: bool | None
) -> None:
    """A checkpoint recomputes all tiles before gradients reach the last: they go and come back."""

    class Plain(Borrowing):
        def head(self, x: Tensor) -> Tensor:
            cuts = [end - begin for begin, end in row_ranges(ROWS, WIDTH, LIMIT // 4)]
            return torch.cat([F.linear(x, part) for part in self.table.weight.split(cuts)], -1)

    with seeded(3):
        model = Borrowing(reentrant)
    with seeded(3):
        plain = Plain()
    names = trainability(model)
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path, bf16=False))
    reference = Reference(plain, hyper_of(engine), bf16=False)
    assert train(engine, model) == train(reference, plain)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert engine.statistics().live_numel_peak <= LIMIT


def test_a_frozen_tiled_base_and_evaluation_between_steps(open_engine: Open, nvme_path: Any) -> None:
    model = wide()
    model.embedding.requires_grad_(False)
    model.embedding.weight.data = model.embedding.weight.data.bfloat16().float()
    plain, names = in_tiles(copy.deepcopy(model)), trainability(model)
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    reference = Reference(plain, hyper_of(engine))
    for step in range(STEPS):
        for trainer in (engine, reference):
            train(trainer, model, 1, step)
            with torch.no_grad():
                trainer(inputs(model, 100 + step))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_ids_outside_the_table_are_an_index_error(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(wide(), config_for(("cpu", "cpu"), nvme_path))
    with pytest.raises(IndexError, match=r"\[0, 3000\), got 3000"):
        engine(torch.full((1, 8), ROWS))


def test_other_arithmetic_on_a_tiled_parameter_says_what_to_do(open_engine: Open, nvme_path: Any) -> None:
    model = wide()
    open_engine(model, config_for(("cpu", "cpu"), nvme_path))
    with pytest.raises(
        StateError, match=r"parameter head\.weight .*tiles.*GatheredParameters.*stage3_max_live_parameters"
    ):
        model.head.weight + 1


class Owned(nn.Module):
    """A large parameter that is no Linear's and no Embedding's alone."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.rows = self.table.weight if shared else nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).float().mean() + self.rows.mean()


@pytest.mark.parametrize("shared", [True, False])
def test_a_large_parameter_of_another_module_is_gathered_whole_and_the_warning_names_the_way_out(
    open_engine: Open, nvme_path: Any, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(Owned(shared), config_for(("cpu", "cpu"), nvme_path))
    (said,) = [r.getMessage() for r in caplog.records if "stage3_max_live_parameters" in r.getMessage()]
    assert re.search(r"nn\.Linear.*nn\.Embedding.*TiledLinear", said)
    engine.backward(engine(torch.zeros(2, dtype=torch.long)))
    engine.step()
    assert engine.statistics().live_numel_peak >= ROWS * WIDTH


@pytest.mark.parametrize(
    ("rows", "width", "limit"),
    [(1, 5_000, 4_096), (3_000, 32, 13_000), (64, 4_096, 4_096), (97, 13, 8_192), (129, 64, 4_096)],
)
def test_tiles_cover_the_rows_once_and_stay_within_the_limit(rows: int, width: int, limit: int) -> None:
    ranges = row_ranges(rows, width, limit)
    assert [row for begin, end in ranges for row in range(begin, end)] == list(range(rows))
    assert all((end - begin) * width <= max(limit, width) for begin, end in ranges)


def test_a_tile_of_a_parameter_takes_no_memory_of_its_own() -> None:
    tile = Tile(nn.Parameter(torch.zeros(100, 10)), 20, 50)
    assert tile.weight.shape == (30, 10) and tile.weight.untyped_storage().nbytes() == 4


def test_models_that_fit_the_limit_are_not_tiled(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(MODELS["gpt"](), make_config(("cpu", "cpu"), nvme_path))
    assert not [unit.name for unit in engine.units if "[0:" in unit.name]


@pytest.mark.parametrize("late", [False, True], ids=["gradient", "accumulated gradient"])
def test_a_weight_with_hooks_of_its_gradient_is_not_cut_and_one_in_tiles_takes_none(
    open_engine: Open, nvme_path: Any, late: bool
) -> None:
    """A mask of the rows that are trained is what such hooks are for."""

    def masked(gradient: Tensor) -> Tensor:
        return gradient * (torch.arange(ROWS) >= 20)[:, None]

    model = Spread()
    if late:
        model.table.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", masked(p.grad)))
    else:
        model.table.weight.register_hook(masked)
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = open_engine(model, config_for(("cpu", "cpu"), nvme_path, bf16=False, optimizer=sgd))
    before = engine.full_master("table.weight")
    engine.backward(engine(torch.arange(40).view(2, 20)))
    engine.step()
    moved = (engine.full_master("table.weight") != before).any(1)
    assert not moved[:20].any() and moved[20:40].all()
    other = open_engine(Spread(), config_for(("cpu", "cpu"), nvme_path, bf16=False))
    for hook in (other.module.table.weight.register_hook, other.module.table.weight.register_post_accumulate_grad_hook):
        with pytest.raises(StateError, match=r"is computed in tiles.*stage3_max_live_parameters"):
            hook(lambda gradient: gradient)


def test_hooks_of_an_engine_do_not_keep_a_weight_from_being_cut_again(open_engine: Open, nvme_path: Any) -> None:
    """The plan for a changed model is made while the old hooks are there."""
    model = Spread()
    engine = open_engine(model, config_for(("cpu", "cpu"), nvme_path))
    before = [unit.name for unit in engine.units if "table" in unit.name]
    model.more = torch.nn.Linear(4, 4)
    assert engine.replan()
    assert [unit.name for unit in engine.units if "table" in unit.name] == before
