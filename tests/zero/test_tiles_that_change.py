"""Parameters in tiles of a model that changes after `initialize`, or whose values come from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, freeze, seeded, trainability
from reference import Reference, changed, differences, round_half_away, snapshot
from tiled import LIMIT, ROWS, config_for, hyper_of, in_tiles, inputs, train, wide
from torch import nn

import zero
from offload.errors import BudgetError
from zero.params.released_parameter import ZeroParamStatus
from zero.params.tiles import TiledParameter

safetensors = pytest.importorskip("safetensors.torch")

Open = Callable[..., Any]
Change = Callable[[Any], None]
PAIRS = [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")]


def add_norm(model: Any) -> None:
    with seeded(11):
        model.norm = nn.Sequential(model.norm, nn.Linear(WIDTH, WIDTH))


def add_table(model: Any) -> None:
    """A second table, in tiles from its first forward on, whose parameter the first one's forward adds to."""
    with seeded(12):
        model.embedding = Two(model.embedding, nn.Embedding(ROWS, WIDTH))


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids) + self.second(ids)


def replace_head(model: Any) -> None:
    with seeded(13):
        model.head = nn.Linear(WIDTH, ROWS, bias=False)


def thaw(model: Any) -> None:
    model.embedding.requires_grad_(True)


CHANGES: dict[str, Change] = {"beside them": add_norm, "another joins": add_table, "replaced": replace_head}


def in_plain_torch(change: Change) -> Change:
    """The change, and sums as tiles make them: a copy of `in_tiles`'s model computes with the first one's head."""

    def both(model: Any) -> None:
        change(model)
        in_tiles(model)

    return both


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        pytest.param(name, pair, id=f"{name}-{'-'.join(pair)}", marks=() if i % 3 == j else pytest.mark.slow)
        for i, name in enumerate(CHANGES)
        for j, pair in enumerate(PAIRS)
    ],
)
def test_tiles_train_on_with_every_bit_when_the_model_changes(
    open_engine: Open, nvme_path: Path, name: str, pair: Any
) -> None:
    model = wide()
    plain = in_tiles(copy.deepcopy(model))
    engine = open_engine(model, config_for(pair, nvme_path))
    reference = Reference(plain, hyper_of(engine))
    assert train(engine, model) == train(reference, plain)
    CHANGES[name](model)
    reference = changed(reference, in_plain_torch(CHANGES[name]))
    assert train(engine, model, first=3) == train(reference, model, first=3)
    assert differences(snapshot(engine, trainability(model)), snapshot(reference, trainability(model))) == []
    assert isinstance(model.head.weight, TiledParameter)
    assert 0 < engine.statistics().live_numel_peak <= LIMIT


@pytest.mark.parametrize(("pair", "bf16"), [(("nvme", "nvme"), True), (("cpu", "cpu"), False)])
def test_accumulated_gradients_of_tiles_are_in_the_step_after_a_change(
    open_engine: Open, nvme_path: Path, pair: Any, bf16: bool
) -> None:
    """Four micro-batches a step; the change comes after two of them, so tiles hold fp32 sums."""
    model = wide()
    plain = in_tiles(copy.deepcopy(model))
    engine = open_engine(model, config_for(pair, nvme_path, accumulation=4, bf16=bf16))
    reference = Reference(plain, hyper_of(engine), bf16=bf16, accumulation=4)
    assert train(engine, model, 2) == train(reference, plain, 2)
    add_norm(model)
    reference = changed(reference, in_plain_torch(add_norm))
    assert train(engine, model, 6, first=2) == train(reference, model, 6, first=2)
    assert differences(snapshot(engine, trainability(model)), snapshot(reference, trainability(model))) == []


class Grown(nn.Linear):
    """Fits the limit as it is, and with a second parameter in its unit does not."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1_000)
        self.extra: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x.to(self.bias.dtype)).float().square().mean()
        return loss if self.extra is None else loss + self.extra.float().square().sum()


def test_a_parameter_goes_into_tiles_and_out_of_them_with_its_states(open_engine: Open, nvme_path: Path) -> None:
    def run(trainer: Any, steps: range) -> None:
        for step in steps:
            x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
            trainer.backward(trainer(x))
            trainer.step()

    def grow(model: Any) -> None:
        model.extra = nn.Parameter(torch.linspace(-1, 1, 12_000))

    def shrink(model: Any) -> None:
        model.extra = None

    with seeded(4):
        model = Grown()
    plain = copy.deepcopy(model)
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path, zero={"stage3_max_live_parameters": 40_960}))
    reference = Reference(plain, hyper_of(engine))
    for first, change in ((0, shrink), (3, grow), (6, shrink)):
        change(model)
        reference = changed(reference, change)
        for trainer in (engine, reference):
            run(trainer, range(first, first + 3))
        assert differences(snapshot(engine, trainability(model)), snapshot(reference, trainability(model))) == []
        assert isinstance(model.weight, TiledParameter) is (change is grow)


def test_a_frozen_table_in_tiles_that_thaws_trains_from_then_on(open_engine: Open, nvme_path: Path) -> None:
    model = wide()
    freeze(model.embedding)
    plain = in_tiles(copy.deepcopy(model))
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    reference = Reference(plain, hyper_of(engine))
    train(engine, model, 2), train(reference, plain, 2)
    thaw(model)
    reference = changed(reference, in_plain_torch(thaw))
    assert train(engine, model, first=2) == train(reference, model, first=2)
    assert differences(snapshot(engine, trainability(model)), snapshot(reference, trainability(model))) == []
    assert engine.full_state("embedding.weight")["step"] == 3


def test_freezing_a_tiled_parameter_stops_its_tiles_and_keeps_their_moments(open_engine: Open, nvme_path: Path) -> None:
    model = wide()
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(engine, model, 2)
    before, plan = engine.full_state("head.weight"), engine.plan
    model.head.requires_grad_(False)
    train(engine, model, 2, first=2)
    after = engine.full_state("head.weight")
    assert after["step"] == 2 and all(torch.equal(after[key], before[key]) for key in ("exp_avg", "exp_avg_sq"))
    model.head.requires_grad_(True)
    train(engine, model, 1, first=4)
    assert engine.full_state("head.weight")["step"] == 3 and engine.plan is plan


def test_what_leaves_the_model_comes_out_of_its_tiles(open_engine: Open, nvme_path: Path) -> None:
    model = wide()
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(engine, model)
    head, held = model.head, engine.full_master("head.weight")
    replace_head(model)
    train(engine, model, 1)
    assert type(head.weight) is nn.Parameter and torch.equal(head.weight, held)
    assert not hasattr(head.weight, "ds_id")


def test_a_change_that_fails_leaves_the_tiles_as_they_were(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero.assembly.engine_parts import EngineParts

    model = wide()
    plain = in_tiles(copy.deepcopy(model))
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    reference = Reference(plain, hyper_of(engine))
    train(engine, model), train(reference, plain)
    norm = model.norm
    add_norm(model)

    def fail(self: Any, source: Any) -> None:
        raise BudgetError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(EngineParts, "fill", fail)
        with pytest.raises(BudgetError, match="on purpose"):
            engine(inputs(model, 3))
    model.norm = norm
    assert train(engine, model, first=3) == train(reference, plain, first=3)


@pytest.mark.parametrize("under_init", [True, False])
def test_a_checkpoint_is_loaded_into_tiles(
    open_engine: Open, nvme_path: Path, tmp_path: Path, under_init: bool
) -> None:
    with seeded(5):
        saved = wide()
        for parameter in saved.parameters():
            parameter.data = torch.randn_like(parameter)
    values = {name: p.detach() for name, p in saved.named_parameters()}
    (tmp_path / "saved").mkdir()
    safetensors.save_file(values, tmp_path / "saved" / "model.safetensors")
    config = config_for(("nvme", "nvme"), nvme_path)
    if under_init:
        with zero.Init(config_dict_or_path=config):
            model = wide()
        assert zero.load_pretrained(model, tmp_path / "saved") == ([], [])
        engine = open_engine(model, config)
    else:
        model = wide()
        engine = open_engine(model, config)
        train(engine, model, 2)
        before = engine.full_state("head.weight")
        assert zero.load_pretrained(engine, tmp_path / "saved") == ([], [])
        after = engine.full_state("head.weight")
        assert after["step"] == before["step"] == 2
        assert all(torch.equal(after[key], before[key]) for key in ("exp_avg", "exp_avg_sq"))
    for name, value in values.items():
        assert torch.equal(engine.full_master(name), value), name
        assert torch.equal(engine.full_parameter(name), round_half_away(value)), name
    assert isinstance(model.head.weight, TiledParameter)
    train(engine, model, 1)


def test_a_tiled_parameter_has_deepspeeds_attributes(open_engine: Open, nvme_path: Path) -> None:
    model = wide()
    engine = open_engine(model, config_for(("nvme", "nvme"), nvme_path))
    train(engine, model, 1)
    weight: Any = model.head.weight
    assert (weight.ds_numel, tuple(weight.ds_shape)) == (ROWS * WIDTH, (ROWS, WIDTH))
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.ds_tensor.numel() == ROWS * WIDTH
    with zero.GatheredParameters([weight]):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert torch.equal(weight.ds_tensor, weight.detach().view(-1))
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
