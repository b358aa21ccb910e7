"""DeepSpeed's checkpoints of stage 0 and its universal ones: made from the samples, with the values that it held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_sample as sample
import pytest
import torch
from deepspeed_craft import STAGES, TAG, change, copy_of, model_file, to_stage0, to_universal
from models import make_config, trainability
from ranks import RankPool
from reference import Hyper, Reference, State, differences, snapshot
from safetensors.torch import load_file

import zero
from offload.errors import ConfigError
from zero.checkpoint.deepspeed import open_deepspeed_folder
from zero.checkpoint.source import OpenCheckpoint

MODEL = sample.build()
NAMES = {id(value): name for name, value in MODEL.named_parameters()}
GROUPS = [[NAMES[id(value)] for value in group["params"]] for group in sample.groups(MODEL)]
TRAINED = [name for group in GROUPS for name in group]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGE0 = {
    "stage 0, fp32": ("plain", "fp32"),
    "stage 0, bf16, fused": ("flat", "bf16"),
    "stage 0, bf16": ("apart", "bf16"),
    "stage 0, fp16, fused": ("flat", "fp16"),
    "stage 0, fp16": ("apart", "fp16"),
}
KINDS = (*STAGE0, *(f"universal, of {stage}" for stage in STAGES))


def make(kind: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of the tag, and what DeepSpeed held."""
    if kind in STAGE0:
        form, dtype = STAGE0[kind]
        tag = copy_of("stage1" if dtype == "bf16" else "stage2", folder)
        to_stage0(tag, form, DTYPES[dtype])
    else:
        tag = copy_of(kind.rpartition(" ")[2], folder)
        to_universal(tag)
    held = load_file(tag.parent / "expected.safetensors")
    if kind in STAGE0:  # where frozen parameters and buffers have the module's dtype
        kept = {f"model.{name}" for name in TRAINED}
        dtype = DTYPES[STAGE0[kind][1]]
        for key, value in held.items():
            if key.startswith("model.") and key not in kept and value.is_floating_point():
                held[key] = value.to(dtype)
    return tag, held


def whole(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
    shape = checkpoint.source.tensors[name].shape
    return checkpoint.source.read(name, 0, shape.numel()).view(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_what_deepspeed_held(kind: str, tmp_path: Path) -> None:
    tag, held = make(kind, tmp_path)
    checkpoint = open_deepspeed_folder(tag, GROUPS)
    for name, value in held.items():
        saved = checkpoint.source.tensors[name]
        assert (saved.shape, saved.dtype) == (value.shape, value.dtype), name
        assert torch.equal(whole(checkpoint, name), value), name
    steps = {f"optim.state.{name}.step" for name in TRAINED}
    assert set(checkpoint.source.tensors) == {*held, *steps, "model.head.weight"}
    assert all(whole(checkpoint, name).item() == 3 for name in steps)
    state = checkpoint.state
    assert [group["params"] for group in state["groups"]] == GROUPS
    assert [group["weight_decay"] for group in state["groups"]] == [0.1, 0.0]
    assert state["frozen"] == ["base.weight", "base.bias"] and state["buffers"] == ["shift", "calls"]
    assert state["aliases"] == {"head.weight": "embedding.weight"}
    assert checkpoint.client(False)["client_state"]["epoch"] == 3


def config_of(kind: str, nvme_path: Path, states: str, **more: Any) -> dict[str, Any]:
    return make_config(
        ("none", states),
        nvme_path,
        accumulation=2 if "fp32" in kind or kind.endswith("stage2") else 1,
        clipping=sample.CLIPPING,
        bf16=not ("fp32" in kind or kind.endswith("stage2")),
        optimizer={"type": "AdamW", "params": dict(sample.OPTIMIZER)},
        zero={"stage": 3, "stage3_param_persistence_threshold": 0},
        **more,
    )


def resume(kind: str, folder: str, nvme_path: str, states: str, tag: str | None = None) -> list[str]:
    """Load with another model and train one step: what differs from a plain trainer that goes on."""
    tag_folder = Path(folder) / TAG
    held = load_file(Path(folder) / "expected.safetensors")
    model = sample.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    config = config_of(kind, Path(nvme_path), states)
    engine = zero.initialize(model=model, model_parameters=sample.groups(model), config=config)[0]
    with engine:
        path, client_state = engine.load_checkpoint(folder, tag)
        assert path == str(tag_folder) and client_state["best"] == 0.25
        plain = sample.build()
        with torch.no_grad():
            for key, value in [*plain.named_parameters(), *plain.named_buffers()]:
                if f"model.{key}" in held:
                    value.copy_(held[f"model.{key}"])
        group_of = {name: number for number, names in enumerate(GROUPS) for name in names}

        def hyper(key: str) -> Hyper:
            group = engine.optimizer.param_groups[group_of[key]]
            return Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"])

        bf16, accumulation = config.get("bf16", {}).get("enabled", False), config["gradient_accumulation_steps"]
        reference = Reference(plain, hyper, bf16, sample.CLIPPING, accumulation)
        for key in reference.states:
            moments = (held[f"optim.state.{key}.{moment}"].clone() for moment in ("exp_avg", "exp_avg_sq"))
            reference.states[key] = State(held[f"model.{key}"].clone(), *moments, 3)
        names = trainability(engine.module)
        found = differences(snapshot(engine, names), snapshot(reference, names))
        assert engine.global_steps == 3
        for index in range(accumulation):
            for trainer in (engine, reference):
                trainer.backward(trainer(sample.batch(index, 0)))
                trainer.step()
        return [*found, *differences(snapshot(engine, names), snapshot(reference, names))]


RESUMED = [kind for kind in KINDS if "fp16" not in kind]


@pytest.mark.parametrize("kind", RESUMED)
def test_training_goes_on_from_what_deepspeed_held(kind: str, tmp_path: Path, nvme_path: Path) -> None:
    tag, _ = make(kind, tmp_path)
    assert resume(kind, str(tag.parent), str(nvme_path), "nvme" if "bf16" in kind else "none") == []


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["stage 0, bf16, fused", "universal, of stage3"])
def test_several_ranks_load_it(
    kind: str, tmp_path: Path, nvme_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    tag, _ = make(kind, tmp_path)
    assert rank_pool(2).run(loaded_on_a_rank, kind, str(tag.parent), str(nvme_path)) == [[], []]


def loaded_on_a_rank(kind: str, folder: str, nvme_path: str) -> list[str]:
    held = load_file(Path(folder) / "expected.safetensors")
    model = sample.build()
    config = config_of(kind, Path(nvme_path), "cpu")
    with zero.initialize(model=model, model_parameters=sample.groups(model), config=config)[0] as engine:
        engine.load_checkpoint(folder)
        found = []
        for name in TRAINED:
            states = engine.full_state(name)
            for kind in ("exp_avg", "exp_avg_sq"):
                found += [kind] * (not torch.equal(states[kind], held[f"optim.state.{name}.{kind}"]))
            found += [name] * (not torch.equal(engine.full_master(name), held[f"model.{name}"]))
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_its_exact_weights_are_exported(kind: str, tmp_path: Path) -> None:
    tag, held = make(kind, tmp_path)
    for folder in (tag, tag.parent):
        weights = zero.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert weights["head.weight"] is weights["embedding.weight"]
        for name, value in MODEL.state_dict().items():
            wanted = held[f"model.{'embedding.weight' if name == 'head.weight' else name}"]
            assert torch.equal(weights[name], wanted.float() if value.is_floating_point() else wanted), name
    zero.convert_zero_checkpoint_to_state_dict(tag, tmp_path / "out", "bf16")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() >= {"first.weight", "base.weight", "shift"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "fused" in kind or kind == "stage 0, fp16"])
def test_the_loss_scale_of_stage_0_is_told(kind: str, tmp_path: Path) -> None:
    tag, _ = make(kind, tmp_path)
    scale = {"dynamic": True, "cur_scale": 4096.0, "cur_iter": 7, "last_overflow_iter": 5}
    assert open_deepspeed_folder(tag, GROUPS).state["loss_scaler"] == scale


@pytest.mark.parametrize("kind", STAGE0)
def test_param_groups_of_another_form_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """DeepSpeed itself would give the states to whichever parameter has the position."""
    tag, _ = make(kind, tmp_path)
    swapped = [[GROUPS[0][1], GROUPS[0][0], *GROUPS[0][2:]], GROUPS[1]]
    for groups, said in (
        ([[*GROUPS[0], *GROUPS[1]]], "expected 2 param groups as in the checkpoint, got 1; make the param groups"),
        ([GROUPS[0][1:], GROUPS[1]], "param group 0: expected .* as in the checkpoint, got .*load_optimizer_states"),
        ([[*GROUPS[0], "another"], GROUPS[1]], "the optimizer has another, which the checkpoint's module lacks"),
        (swapped, "embedding.weight|first.weight"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_deepspeed_folder(tag, groups)


def test_without_an_optimizer_the_weights_of_stage_0_are_read(tmp_path: Path) -> None:
    tag, held = make("stage 0, fp32", tmp_path)
    change(model_file(tag), lambda contents: contents.update(optimizer=None))
    checkpoint = open_deepspeed_folder(tag, GROUPS)
    assert not [name for name in checkpoint.source.tensors if name.startswith("optim.")]
    assert torch.equal(whole(checkpoint, "model.first.weight"), held["model.first.weight"])


def test_before_the_first_step_of_stage_0_there_are_weights_and_groups(tmp_path: Path) -> None:
    tag, held = make("stage 0, fp32", tmp_path)
    change(model_file(tag), lambda contents: contents["optimizer"]["state"].clear())
    checkpoint = open_deepspeed_folder(tag, GROUPS)
    assert not [name for name in checkpoint.source.tensors if name.startswith("optim.")]
    assert [group["params"] for group in checkpoint.state["groups"]] == GROUPS
    assert torch.equal(whole(checkpoint, "model.scale"), held["model.scale"])


def test_frozen_parameters_that_the_saved_optimizer_lists_have_no_states(tmp_path: Path) -> None:
    def list_frozen(contents: dict[str, Any]) -> None:
        contents["optimizer"]["param_groups"][0]["params"] += [100, 101]

    tag, held = make("stage 0, fp32", tmp_path)
    change(model_file(tag), list_frozen)
    checkpoint = open_deepspeed_folder(tag, GROUPS)
    for name in TRAINED:
        assert torch.equal(whole(checkpoint, f"optim.state.{name}.exp_avg"), held[f"optim.state.{name}.exp_avg"])


def test_states_of_other_optimizers_keep_their_names(tmp_path: Path) -> None:
    def momentum(contents: dict[str, Any]) -> None:
        for state in contents["optimizer"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"], state["step"]

    tag, held = make("stage 0, fp32", tmp_path)
    change(model_file(tag), momentum)
    checkpoint = open_deepspeed_folder(tag, GROUPS)
    for name in TRAINED:
        found = whole(checkpoint, f"optim.state.{name}.momentum_buffer")
        assert torch.equal(found, held[f"optim.state.{name}.exp_avg"])
        assert whole(checkpoint, f"optim.state.{name}.step").item() == 3


def unknown_optimizer(contents: dict[str, Any]) -> None:
    contents["optimizer"] = {"shards": [1, 2]}


def no_module(contents: dict[str, Any]) -> None:
    contents["module"] = None


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (unknown_optimizer, "expected the state dict of a torch optimizer.*got shards; save the weights"),
        (no_module, "DeepSpeed's pipelines cannot be read"),
        (lambda contents: contents.update(param_shapes=[]), "or an optimizer in mp_rank_00_model_states.pt as of"),
    ],
)
def test_what_cannot_be_read_of_stage_0_is_named(edit: Any, said: str, tmp_path: Path) -> None:
    tag, _ = make("stage 0, fp32", tmp_path)
    change(model_file(tag), edit)
    with pytest.raises(ConfigError, match=said):
        open_deepspeed_folder(tag, GROUPS)


def test_weights_that_do_not_belong_together_are_not_exported(tmp_path: Path) -> None:
    def shift(contents: dict[str, Any]) -> None:
        contents["module"]["first.weight"] += 1

    tag, _ = make("stage 0, bf16, fused", tmp_path)
    change(model_file(tag), shift)
    with pytest.raises(ConfigError, match="param group 0 are not those of the module from element 78 on"):
        open_deepspeed_folder(tag)
    with pytest.raises(ConfigError, match=r"first.weight: its fp32 values in param group 0 are not those of the"):
        open_deepspeed_folder(tag, GROUPS)


@pytest.mark.parametrize("stage", STAGES)
def test_a_universal_file_that_is_missing_cut_short_or_of_another_size_is_named(stage: str, tmp_path: Path) -> None:
    tag, _ = make(f"universal, of {stage}", tmp_path)
    own = tag / "zero" / "first.weight"
    data = (own / "exp_avg.pt").read_bytes()
    (own / "exp_avg.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"first.weight/exp_avg.pt: expected exp_avg of first.weight"):
        open_deepspeed_folder(tag)
    torch.save(torch.zeros(3), own / "exp_avg.pt")
    with pytest.raises(ConfigError, match=r"expected a tensor of 42 elements, shape \(7, 6\), got 3 elements"):
        open_deepspeed_folder(tag)
    (own / "fp32.pt").unlink()
    with pytest.raises(ConfigError, match=r"first.weight/fp32.pt: missing; expected the weight of first.weight"):
        open_deepspeed_folder(tag)
    (tag / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(ConfigError, match=r"zero/optimizer_state.pt: missing; expected the optimizer's common state"):
        open_deepspeed_folder(tag)


def test_a_universal_name_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    def lead_out(contents: dict[str, Any]) -> None:
        contents["param_shapes"][0]["../../secret"] = torch.Size([1])

    tag, _ = make("universal, of stage1", tmp_path)
    change(model_file(tag), lead_out)
    with pytest.raises(ConfigError, match=r"'../../secret': it leads out of its folder"):
        open_deepspeed_folder(tag)


def test_steps_of_a_universal_checkpoint_may_be_in_its_param_groups(tmp_path: Path) -> None:
    """Fused Adam keeps them there."""
    tag, _ = make("universal, of stage1", tmp_path)
    for path in tag.glob("zero/*/step.pt"):
        path.unlink()

    def count(contents: dict[str, Any]) -> None:
        for group in contents["param_groups"]:
            group["step"] = 5

    change(tag / "zero" / "optimizer_state.pt", count)
    checkpoint = open_deepspeed_folder(tag)
    assert whole(checkpoint, "optim.state.scale.step").item() == 5


@pytest.mark.parametrize("universal", [False, True])
def test_the_key_chooses_between_a_checkpoint_and_its_universal_form(
    universal: bool, tmp_path: Path, nvme_path: Path
) -> None:
    tag, _ = make("universal, of stage1", tmp_path)
    tag = tag.rename(tag.with_name("global_step3_universal"))
    (tag.parent / "latest_universal").write_text(tag.name)
    copy_of("stage1", tmp_path / "again")
    (tmp_path / "again" / "stage1" / TAG).rename(tag.parent / TAG)
    (tag.parent / "latest").write_text(TAG)
    config = config_of("stage1", nvme_path, "none", checkpoint={"load_universal": universal})
    model = sample.build()
    with zero.initialize(model=model, model_parameters=sample.groups(model), config=config)[0] as engine:
        path, _ = engine.load_checkpoint(tag.parent)
    assert path == str(tag if universal else tag.parent / TAG)


def test_what_older_versions_add_is_no_client_state(tmp_path: Path) -> None:
    tag = copy_of("stage1", tmp_path)
    change(model_file(tag), lambda contents: contents.update(sparse_tensor_module_names=set()))
    assert "sparse_tensor_module_names" not in open_deepspeed_folder(tag).client(False)["client_state"]


@pytest.mark.parametrize("kind", ["stage 0, fp32", "stage 0, bf16, fused", "stage 0, bf16", "stage 1"])
def test_param_groups_of_the_engine_may_list_frozen_parameters(kind: str, tmp_path: Path, nvme_path: Path) -> None:
    tag = copy_of("stage1", tmp_path) if kind == "stage 1" else make(kind, tmp_path)[0]
    held = load_file(tag.parent / "expected.safetensors")
    model = sample.build()
    groups = sample.groups(model)
    groups[0]["params"][1:1] = model.base.parameters()
    config = config_of(kind, nvme_path, "none")
    del config["optimizer"]
    optimizer = torch.optim.AdamW(groups)
    with zero.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        engine.load_checkpoint(tag.parent)
        for name in TRAINED:
            assert torch.equal(engine.full_state(name)["exp_avg"], held[f"optim.state.{name}.exp_avg"]), name


@pytest.mark.parametrize("groups", [[["weight", "scalar"]], None], ids=["named", "by value"])
def test_a_scalar_of_a_flat_group_has_its_shape(tmp_path: Path, groups: list[list[str]] | None) -> None:
    flat = torch.tensor([1.5, 2.5, 3.5])
    module = {"weight": flat[:2].bfloat16(), "scalar": flat[2].bfloat16()}
    state = {0: {"step": 2, "exp_avg": flat + 1, "exp_avg_sq": flat + 2}}
    optimizer = {"optimizer_state_dict": {"state": state, "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]}}
    counts = {"buffer_names": [], "global_steps": 2, "skipped_steps": 0}
    saved = {"module": module, "optimizer": {**optimizer, "fp32_groups_flat": [flat]}, **counts}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    source = open_deepspeed_folder(tmp_path, groups).source
    assert source.tensors["model.scalar"].shape == source.tensors["optim.state.scalar.exp_avg"].shape == torch.Size()
    assert source.read("model.scalar", 0, 1).item() == 3.5
    assert source.read("optim.state.scalar.exp_avg", 0, 1).item() == 4.5
