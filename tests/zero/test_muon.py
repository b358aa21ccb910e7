"""Muon for hidden matrices, AdamW for the rest: the bits of torch's class on whole ones, wherever states are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from models import LIVE_NUMEL, build, make_config, trainability
from muon_plain import BLOCK, MuonAndAdam
from pairwise import in_pairs
from probe import layout_of, units_read_once
from reference import differences as reference_differences
from tiled_optimizers import Plain, differences, held_by, patchy, train

from offload.errors import ConfigError
from zero.assembly.model_plan import plan_model
from zero.config import load_config, reading_as_deepspeed
from zero.plan.machine import Machine

STEPS = 8
TIERS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"))
Open = Callable[..., Any]


def opened(open_engine: Open, folder: Path, pair: tuple[str, str], **more: Any) -> tuple[Any, torch.nn.Module]:
    model = patchy()
    zero = {"sub_group_size": 8192, **more.pop("zero", {})}
    return open_engine(model, make_config(pair, folder, optimizer=BLOCK, zero=zero, **more)), model


@in_pairs(pair=TIERS, bf16=(False, True), clipping=(0.0, 0.05), threshold=(0, 1000, 100_000), sub_group=(4096, 1 << 30))
def test_it_equals_torchs_muon_and_adam_bit_for_bit(
    open_engine: Open,
    nvme_path: Path,
    pair: tuple[str, str],
    bf16: bool,
    clipping: float,
    threshold: int,
    sub_group: int,
) -> None:
    zero = {"sub_group_size": sub_group, "stage3_param_persistence_threshold": threshold}
    engine, model = opened(open_engine, nvme_path, pair, bf16=bf16, clipping=clipping, zero=zero)
    plain = Plain(MuonAndAdam, {}, bf16=bf16, clipping=clipping)
    train(engine, 0, STEPS, bf16=bf16)
    train(plain, 0, STEPS, bf16=bf16)
    assert differences(held_by(engine, model), plain.held()) == []


def muon_config(folder: Path, pair: tuple[str, str], **more: Any) -> dict[str, Any]:
    return make_config(pair, folder, optimizer=BLOCK, clipping=0.3, **more)


def test_which_is_which_follows_names_and_shapes_and_what_is_said(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    model.blocks[0].up.weight.use_muon = False
    model.embedding.weight.use_muon = True
    engine = open_engine(model, muon_config(nvme_path, ("cpu", "cpu")))
    name_of = {id(p): name for name, p in model.named_parameters()}
    muon, adam = ({name_of[id(p)] for p in group["params"]} for group in engine.optimizer.param_groups)
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.02, 3e-3]
    two = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert muon == two - {"blocks.0.up.weight"} and adam == set(name_of.values()) - muon
    assert {name for name in two if "embed" in name} == {"embedding.weight"}, "which would be none by its name"


def test_a_group_that_says_so_is_not_asked_for_shapes(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices[:2], "use_muon": False, "lr": 0.5}, {"params": matrices[2:], "use_muon": True}]
    engine = open_engine(model, muon_config(nvme_path, ("cpu", "cpu")), model_parameters=groups)
    told = [(group["use_muon"], group["lr"], len(group["params"])) for group in engine.optimizer.param_groups]
    assert told == [(False, 0.5, 2), (True, 0.02, len(matrices) - 2)]


def test_a_vector_that_is_said_to_be_muons_is_refused_by_name(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    model.norm.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"Muon updates matrices, and norm\.weight has the shape \(32,\).*use_muon"):
        open_engine(model, muon_config(nvme_path, ("cpu", "cpu")))


def test_records_of_matrices_have_one_state(open_engine: Open, nvme_path: Path) -> None:
    """bf16 weights: the remainder and a momentum, 6 bytes beside the weight's 2; AdamW keeps 10 beside them."""
    sizes = {}
    for kind, block in (("muon", BLOCK), ("adam", {"type": "AdamW"})):
        zero = {"stage3_param_persistence_threshold": 0}
        engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, optimizer=block, zero=zero))
        sizes[kind] = next(
            row.nbytes for row in engine.plan.rows if (row.tier, row.array) == ("nvme", "optimizer states")
        )
        if kind == "muon":
            layout = layout_of(engine)
            matrices = sum(space.numel for space in layout.spaces if space.units[0].needs_whole_parameters)
            others = sum(space.numel for space in layout.spaces if not space.units[0].needs_whole_parameters)
            pages = 4096 * len(engine.plan.sub_groups)
            assert 0 <= sizes[kind] - (6 * matrices + 10 * others) < pages
    assert sizes["muon"] < sizes["adam"]


def everything(engine: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By "name/plane"."""
    held = {}
    with units_read_once(engine):
        for name, trained in trainability(model):
            held[f"{name}/weight"] = engine.full_parameter(name)
            if trained:
                held[f"{name}/master"] = engine.full_master(name)
                states = {kind: value for kind, value in engine.full_state(name).items() if kind != "step"}
                held.update({f"{name}/{kind}": value for kind, value in states.items()})
    return held


@pytest.mark.parametrize("kind", ["gpt", "tied", "lora", "mixed", "reused"])
def test_every_place_and_budget_gives_the_same_bits(open_engine: Open, nvme_path: Path, kind: str) -> None:
    def trained(pair: tuple[str, str], zero: dict[str, Any], **more: Any) -> dict[str, Any]:
        model = build(kind)
        engine = open_engine(model, muon_config(nvme_path, pair, accumulation=2, zero=zero, **more))
        harness.train(engine, *range(6))
        assert engine.global_steps == 3
        return everything(engine, model)

    first = trained(("none", "none"), {})
    small = {"stage3_max_live_parameters": LIVE_NUMEL, "sub_group_size": 4096, "stage3_param_persistence_threshold": 0}
    assert reference_differences(trained(("nvme", "nvme"), small), first) == []
    assert reference_differences(trained(("cpu", "nvme"), {"sub_group_size": 20_000}), first) == []


def test_a_checkpoint_goes_on_elsewhere_and_torchs_form_of_the_states_too(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine, model = opened(open_engine, nvme_path, ("nvme", "nvme"))
    train(engine, 0, 5, bf16=True)
    engine.save_checkpoint(tmp_path)
    states = engine.optimizer.state_dict()
    train(engine, 5, 9, bf16=True)
    resumed, other = opened(open_engine, nvme_path, ("cpu", "cpu"), zero={"stage3_param_persistence_threshold": 0})
    resumed.load_checkpoint(tmp_path)
    train(resumed, 5, 9, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []
    again, third = opened(open_engine, nvme_path, ("none", "none"))
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    again.optimizer.load_state_dict(states)
    train(again, 5, 9, bf16=True)
    assert differences(held_by(again, third), held_by(engine, model)) == []


DEEPSPEEDS = (
    {"type": "Muon", "params": {"lr": 2e-3, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}},
    {"type": "Muon", "params": {"muon_lr": 2e-4, "adam_lr": 2e-6, "betas": [0.9, 0.95], "eps": 1e-10}},
    {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3}},
    {"type": "FusedLamb", "params": {"lr": 1e-3, "min_coeff": 0.01}},
)


@pytest.mark.parametrize("block", DEEPSPEEDS, ids=lambda block: f"{block['type']} {len(block['params'])}")
def test_deepspeeds_configurations_train(open_engine: Open, nvme_path: Path, block: dict[str, Any]) -> None:
    with reading_as_deepspeed():
        config = load_config(make_config(("cpu", "nvme"), nvme_path, optimizer=block), world_size=1)
    engine = open_engine(build("gpt"), config)
    first, *_, last = harness.losses_of(engine, *[0] * 8)
    assert last < first and engine.global_steps == 8


def test_what_joins_the_model_later_joins_the_group_of_its_kind(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    engine = open_engine(model, muon_config(nvme_path, ("cpu", "nvme")))
    harness.train(engine, 0)
    model.blocks[0].up = torch.nn.Sequential(model.blocks[0].up, torch.nn.Linear(128, 128))
    harness.train(engine, 1, 2)
    (muon, adam) = engine.optimizer.param_groups
    joined = model.blocks[0].up[1]
    assert any(p is joined.weight for p in muon["params"]) and any(p is joined.bias for p in adam["params"])
    assert set(engine.full_state("blocks.0.up.1.weight")) == {"step", "momentum_buffer"}
    assert set(engine.full_state("blocks.0.up.1.bias")) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_cycle_of_momenta_leaves_adams_part_alone(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}}
    engine = open_engine(build("gpt"), {**muon_config(nvme_path, ("cpu", "cpu")), "scheduler": cycle})
    harness.train(engine, 0, 1)
    (muon, adam) = engine.optimizer.param_groups
    assert "betas" not in muon and adam["betas"] == (0.9, 0.95)
    assert "cycle_momentum has no effect" in caplog.text


def test_the_plan_says_how_much_of_several_ranks_slices_is_padding() -> None:
    """Three matrices of one size: each of four ranks has room for one."""
    model = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    config = load_config({"optimizer": BLOCK, "zero_optimization": {"stage": 3}}, world_size=4)
    machine = Machine(1 << 30, "the test", None, None, 0)
    layout, plan = plan_model(model, config, machine, torch.device("cpu"), 4)
    assert [unit.numel for unit in layout.units] == [4 * 4096]
    assert any(note.startswith("25% of the 16,384 elements that are updated as whole") for note in plan.notes)
    _, alone = plan_model(model, load_config({"optimizer": BLOCK}), machine, torch.device("cpu"))
    assert not any("padding" in note for note in alone.notes)


def test_a_checkpoint_of_groups_that_another_rule_updated_is_refused(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def opened(second: bool) -> Any:
        model = build("gpt")
        matrices = [block.up.weight for block in model.blocks]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        groups = [{"params": matrices[:1], "use_muon": True}, {"params": matrices[1:], "use_muon": second}]
        groups.append({"params": rest, "use_muon": False})
        return open_engine(model, muon_config(nvme_path, ("cpu", "cpu")), model_parameters=groups)

    harness.train(opened(True), 0).save_checkpoint(tmp_path)
    engine = opened(False)
    with pytest.raises(ConfigError, match="param group 1: expected use_muon True as in the checkpoint, got False"):
        engine.load_checkpoint(tmp_path)
    harness.train(engine, 0)


@pytest.mark.parametrize("muon", [True, False])
def test_a_group_that_is_added_has_the_defaults_of_its_rule(open_engine: Open, nvme_path: Path, muon: bool) -> None:
    model = build("gpt")
    engine = open_engine(model, muon_config(nvme_path, ("cpu", "cpu")))
    harness.train(engine, 0)
    model.more = torch.nn.Linear(128, 128, bias=False)
    engine.optimizer.add_param_group({"params": [model.more.weight], "use_muon": muon})
    added = engine.optimizer.param_groups[-1]
    assert ("betas" in added, "momentum" in added) == (not muon, muon) and added["lr"] > 0
    harness.train(engine, 1, 2)


@pytest.mark.parametrize("edit", [False, True])
def test_a_parameter_that_moves_to_a_group_of_the_other_rule_is_refused_and_can_go_back(
    open_engine: Open, nvme_path: Path, edit: bool
) -> None:
    """Its states are of the first rule. `edit`: the model changes in between, so everything is planned again."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, optimizer=BLOCK, bf16=False))

    def backward(seed: int) -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(x).square().mean())

    backward(0)
    engine.step()
    of_muon, of_adam = sorted(engine.optimizer.param_groups, key=lambda group: not group["use_muon"])
    of_adam["params"].append(of_muon["params"].pop())
    if edit:
        model.append(torch.nn.Linear(64, 64))
    backward(1)
    with pytest.raises(ConfigError, match=r"shape \(64, 64\) is in a group of Adam, but its states are of .*Muon"):
        engine.step()
    assert engine.global_steps == 1
    of_muon["params"].append(next(p for p in of_adam["params"] if p is model[1].weight))
    of_adam["params"][:] = [p for p in of_adam["params"] if p is not model[1].weight]
    before = engine.full_parameter("1.weight").clone()
    engine.step()
    assert engine.global_steps == 2 and not torch.equal(engine.full_parameter("1.weight"), before)
    assert set(engine.optimizer.state[model[1].weight]) >= {"momentum_buffer"}
