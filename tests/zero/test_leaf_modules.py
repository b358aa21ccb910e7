"""Leaf modules: DeepSpeed's functions and its config block, and what a leaf is here: one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Attention, Block, build, make_config, tokens, trainability
from reference import Hyper, Reference, differences, snapshot
from torch import nn

import zero
from offload.errors import ConfigError
from zero.params.leaf_modules import flag_fine_modules

Open = Callable[..., Any]
LARGE = {"stage3_max_live_parameters": 300_000}


@pytest.mark.parametrize("classes", [[Block], ["Block"], [f"{Block.__module__}.Block"], ["Nothing", Block]])
def test_modules_are_flagged_by_class_and_by_name_of_the_class(classes: list[Any]) -> None:
    model = build("gpt")
    found = zero.set_z3_leaf_modules(model, classes)
    assert found == list(model.blocks) == zero.get_z3_leaf_modules(model)
    assert all(zero.z3_leaf_module(block) for block in model.blocks) and not zero.z3_leaf_module(model)
    assert zero.unset_z3_leaf_modules(model, classes) == found
    assert zero.get_z3_leaf_modules(model) == []


def test_a_class_that_is_not_there_is_an_error_that_says_what_is() -> None:
    model = build("gpt")
    with pytest.raises(
        ValueError, match=r"GPT has no module of the classes torch.*Conv2d, Router; it has Attention, Bl"
    ):
        zero.set_z3_leaf_modules(model, [nn.Conv2d, "Router"])
    with pytest.raises(TypeError, match="expected classes or names of classes"):
        zero.set_z3_leaf_modules(model, [3])  # type: ignore[list-item]
    assert zero.set_z3_leaf_modules(model, ["Router"], raise_if_not_found=False) == []


def test_modules_are_flagged_by_name_and_suffix_and_missing_ones_are_told() -> None:
    model: Any = build("gpt")
    found, missing = zero.set_z3_leaf_modules_by_name(model, ["blocks.1", "blocks.9"], raise_if_not_found=False)
    assert found == [model.blocks[1]] and missing == ["blocks.9"]
    found, missing = zero.set_z3_leaf_modules_by_suffix(model, ["attention", "router"], raise_if_not_found=False)
    assert found == [block.attention for block in model.blocks] and missing == ["router"]
    with pytest.raises(ValueError, match=r"no module named blocks\.9; it has embedding, blocks"):
        zero.set_z3_leaf_modules_by_name(model, ["blocks.9"])
    with pytest.raises(ValueError, match="no module whose name ends in router"):
        zero.set_z3_leaf_modules_by_suffix(model, ["router"])


def units(engine: Any) -> dict[str, set[str]]:
    return {unit.name: {slot.name for slot in unit.slots} for unit in engine.units}


LEAF_CONFIGS: dict[str, dict[str, Any]] = {
    "classes": {"classes": ["Attention"]},
    "names": {"names": [f"blocks.{i}.attention" for i in range(3)]},
    "name_suffixes": {"name_suffixes": "attention"},
}


@pytest.mark.parametrize("block", LEAF_CONFIGS.values(), ids=LEAF_CONFIGS)
def test_the_config_makes_leaves_that_are_fetched_as_one(open_engine: Open, nvme_path: Any, block: Any) -> None:
    """Two Linears of an attention are two units under a tight limit, and one as a leaf."""
    tight = {"stage3_max_live_parameters": 16_384}
    loose = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=tight))
    assert {"blocks.0.attention.qkv", "blocks.0.attention.out"} <= set(units(loose))
    model = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, zero={**tight, "leaf_module": block}))
    names = {f"blocks.0.attention.{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")}
    assert units(engine)["blocks.0.attention"] == names
    leaves = [p for name, p in model.named_parameters() if zero.z3_leaf_parameter(p)]
    assert len(leaves) == 12
    assert model.blocks[0].attention.qkv.weight.ds_z3_leaf_module is model.blocks[0].attention


@pytest.mark.parametrize("leaf", ["root", "list of blocks"])
def test_a_leaf_is_one_unit_however_large_and_trains_to_the_same_bits(
    open_engine: Open, nvme_path: Any, leaf: str
) -> None:
    def leafy() -> Any:
        model: Any = build("gpt")
        zero.params.leaf_modules.set_z3_leaf_module(model if leaf == "root" else model.blocks, True)
        return model

    model = leafy()
    names = trainability(model)
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, zero=LARGE))
    assert len([unit for unit in engine.units if any("blocks" in slot.name for slot in unit.slots)]) == 1
    hyper = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
    reference = Reference(build("gpt"), lambda name: hyper)
    for trainer in (engine, reference):
        for index in range(3):
            trainer.backward(trainer(tokens(index)))
            trainer.step()
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    assert all(releases >= 3 for releases in engine.statistics().releases_by_unit.values())


def test_a_flag_that_was_taken_away_counts_for_the_next_engine(open_engine: Open, nvme_path: Any) -> None:
    model: Any = build("gpt")
    zero.set_z3_leaf_modules(model, [nn.ModuleList])
    config = make_config(("cpu", "cpu"), nvme_path, zero=LARGE)
    assert "blocks" in units(open_engine(model, config))
    zero.unset_z3_leaf_modules(model, [nn.ModuleList])
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(units(open_engine(model, config)))
    assert not any(zero.z3_leaf_parameter(parameter) for parameter in model.parameters())


UNKNOWN = {
    "classes": (["Router"], r"leaf_module\.classes: GPT has no module of the classes Router; it has Attention"),
    "names": (["blocks.0", "block.1"], r"leaf_module\.names: GPT has no module named block\.1; it has embedding"),
    "name_suffixes": (["gate"], r"leaf_module\.name_suffixes: GPT has no module whose name ends in gate"),
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_leaf_that_is_not_there_is_a_config_error(open_engine: Open, nvme_path: Any, key: str) -> None:
    words, message = UNKNOWN[key]
    with pytest.raises(ConfigError, match=message):
        open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, zero={"leaf_module": {key: words}}))


def test_deepspeeds_default_classes_may_be_missing(open_engine: Open, nvme_path: Any) -> None:
    """A config that DeepSpeed has dumped names them for every model; others in the list count."""
    defaults = list(zero.config.zero_block.DEEPSPEED_LEAF_CLASSES)
    config = make_config(("cpu", "cpu"), nvme_path, zero={"leaf_module": {"classes": defaults}})
    model = build("gpt")
    open_engine(model, config)
    assert zero.get_z3_leaf_modules(model) == []
    both = make_config(("cpu", "cpu"), nvme_path, zero={"leaf_module": {"classes": [*defaults, "Attention"]}})
    open_engine(model, both)
    assert all(isinstance(module, Attention) for module in zero.get_z3_leaf_modules(model))


@pytest.mark.parametrize("wrong", [3, [""], [None], {"a": 1}])
def test_what_is_no_list_of_names_is_refused_by_its_key(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.leaf_module\.names: expected a name, or a list of names"
    ):
        zero.config.load_config({"train_batch_size": 1, "zero_optimization": {"leaf_module": {"names": wrong}}})


def test_torch_is_not_confused_by_the_flag() -> None:
    """The flag is a plain attribute: no buffer, no parameter, nothing in the state dict."""
    model = build("gpt")
    keys = list(model.state_dict())
    zero.set_z3_leaf_modules(model, [Block])
    assert list(model.state_dict()) == keys and not any(isinstance(v, torch.Tensor) for v in vars(model).values())


# ---- fine modules ------------------------------------------------------------------------------


def fine_tree() -> nn.Module:
    """Granularity by hand: root (300 + 12) / 6 = 52, fine 12 / 3 = 4, coarse 300 / 2 = 150."""
    fine = nn.Module()
    fine.one, fine.two, fine.nothing = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False), nn.GELU()
    coarse = nn.Module()
    coarse.inner = nn.Linear(10, 30, bias=False)
    root = nn.Module()
    root.list = nn.ModuleList([fine, coarse])
    return root


@pytest.mark.parametrize(
    ("granularity_numel", "flagged"),
    [(0, []), (3, []), (4, ["list.0"]), (51, ["list.0"]), (52, [""]), (150, [""]), (10**9, [""])],
)
def test_modules_as_fine_as_the_threshold_are_leaves_outer_ones_first(
    granularity_numel: int, flagged: list[str]
) -> None:
    model = fine_tree()
    found = flag_fine_modules(model, granularity_numel)
    assert [name for name, module in model.named_modules() if module in found] == flagged
    assert zero.get_z3_leaf_modules(model) == found


def test_containers_and_modules_without_others_inside_are_no_leaves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.GELU()]), nn.ModuleDict())
    assert flag_fine_modules(model, 10**9) == []


def test_a_large_module_is_no_leaf_however_fine() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.embedding = nn.Embedding(2**20, 2**10)
        model.fine = nn.TransformerEncoderLayer(8, 2, 8)
    assert model.fine in flag_fine_modules(model, 10**12) and not zero.z3_leaf_module(model)


def test_a_threshold_that_finds_nothing_says_what_would(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "zero"):
        assert flag_fine_modules(fine_tree(), 3) == []
        assert flag_fine_modules(fine_tree(), 4) != []
    (record,) = caplog.records
    assert "no module has at most 3 elements per inner module; the least is 4, in list.0" in record.getMessage()


def test_the_key_makes_fine_modules_units(open_engine: Open, nvme_path: Any) -> None:
    """An attention of two Linears is two units under a tight limit, and one where it counts as fine."""
    model = build("gpt")
    attention = sum(p.numel() for p in model.blocks[0].attention.parameters()) // 3
    zero_keys = {"stage3_max_live_parameters": 16_384, "stage3_module_granularity_threshold": attention}
    engine = open_engine(model, make_config(("cpu", "cpu"), nvme_path, zero=zero_keys))
    names = {f"blocks.0.attention.{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")}
    assert any(names <= unit for unit in units(engine).values())
    coarse = {**zero_keys, "stage3_module_granularity_threshold": 0}
    plain = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, zero=coarse))
    assert not any(names <= unit for unit in units(plain).values())
