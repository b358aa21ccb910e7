"""Reading what DeepSpeed wrote, without DeepSpeed: the committed samples, whole and damaged."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import deepspeed_sample as sample
import pytest
import torch
from deepspeed_craft import SAMPLES, STAGES, TAG, change, copy_of, model_file, optim_file, to_nvme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import offload.files.torch_file
from offload.errors import ConfigError, StorageError
from zero.checkpoint.deepspeed import is_deepspeed_folder, open_deepspeed_folder
from zero.checkpoint.source import OpenCheckpoint

EXPECTED = {stage: load_file(SAMPLES / stage / "expected.safetensors") for stage in STAGES}
EXPORTED = {stage: load_file(SAMPLES / stage / "zero_to_fp32.safetensors") for stage in STAGES}
TRAINED = [name for name, value in sample.build().named_parameters() if value.requires_grad]


def whole(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
    shape = checkpoint.source.tensors[name].shape
    return checkpoint.source.read(name, 0, shape.numel()).view(shape)


def assert_holds(checkpoint: OpenCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        saved = checkpoint.source.tensors[name]
        assert (saved.shape, saved.dtype) == (value.shape, value.dtype), name
        assert torch.equal(whole(checkpoint, name), value), name


@pytest.mark.parametrize("stage", STAGES)
def test_values_are_what_deepspeed_held(stage: str) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    assert_holds(checkpoint, EXPECTED[stage])
    steps = {f"optim.state.{name}.step" for name in TRAINED}
    assert set(checkpoint.source.tensors) == {*EXPECTED[stage], *steps, "model.head.weight"}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_what_deepspeeds_own_script_makes_of_the_folder(stage: str) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    weights = {name for name in checkpoint.source.tensors if name.startswith("model.")}
    # At stage 1 it leaves out what is frozen, which lies with the other 16-bit weights there.
    left_out = {"model.base.weight", "model.base.bias"} if stage == "stage1" else set()
    assert {f"model.{name}" for name in EXPORTED[stage]} == weights - left_out
    for name, value in EXPORTED[stage].items():
        assert torch.equal(whole(checkpoint, f"model.{name}").to(value.dtype), value), name


@given(stage=st.sampled_from(STAGES), data=st.data())
def test_a_range_is_that_part_of_the_whole(stage: str, data: st.DataObject) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    name = data.draw(st.sampled_from(sorted(EXPECTED[stage])))
    flat = EXPECTED[stage][name].reshape(-1)
    begin = data.draw(st.integers(0, flat.numel()))
    end = data.draw(st.integers(begin, flat.numel()))
    assert torch.equal(checkpoint.source.read(name, begin, end), flat[begin:end])


@pytest.mark.parametrize("stage", STAGES)
def test_a_range_reads_its_own_bytes_and_no_others(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    read, plain = [], offload.files.torch_file.read_range

    def counted(path: Path, offset: int, out: torch.Tensor) -> None:
        read.append(out.nbytes)
        plain(path, offset, out)

    monkeypatch.setattr(offload.files.torch_file, "read_range", counted)
    checkpoint.source.read("model.embedding.weight", 30, 61)
    assert sum(read) == 31 * 4


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_stays_mapped_or_open(stage: str) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    checkpoint.source.read("model.first.weight", 3, 9)
    folder = str(SAMPLES / stage / TAG)
    assert folder not in Path("/proc/self/maps").read_text()
    assert not [link for link in Path("/proc/self/fd").iterdir() if folder in str(link.resolve())]


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_names_what_was_trained_and_how(stage: str) -> None:
    state = open_deepspeed_folder(SAMPLES / stage / TAG).state
    model = sample.build()
    assert state["parameters"] == [name for name, _ in model.named_parameters()]
    assert state["frozen"] == ["base.weight", "base.bias"] and state["has_frozen"]
    assert state["buffers"] == ["shift", "calls"]
    assert state["aliases"] == {"head.weight": "embedding.weight"}
    names = {id(value): name for name, value in model.named_parameters()}
    groups = sample.groups(model)
    assert [group["params"] for group in state["groups"]] == [[names[id(p)] for p in g["params"]] for g in groups]
    assert [group["weight_decay"] for group in state["groups"]] == [0.1, 0.0]
    assert all(group["betas"] == (0.9, 0.99) and group["eps"] == 1e-6 for group in state["groups"])
    accumulation = 2 if stage == "stage2" else 1
    assert (state["global_steps"], state["micro_steps"], state["skipped_steps"]) == (3, 3 * accumulation, 0)
    dtype = "float32" if stage == "stage2" else "bfloat16"
    assert state["dtypes"] == dict.fromkeys([*state["parameters"], "head.weight"], dtype)
    assert state["config"]["zero_optimization"]["stage"] == int(stage[-1])
    assert state["loss_scaler"]["cur_scale"] == 1.0 and state["deepspeed"] == "0.19.8"


@pytest.mark.parametrize("stage", STAGES)
def test_client_state_and_scheduler_come_back(stage: str) -> None:
    client = open_deepspeed_folder(SAMPLES / stage / TAG).client(False)
    generator = client["client_state"].pop("generator")
    assert torch.equal(generator, sample.CLIENT_STATE["generator"])
    assert client["client_state"] == {key: sample.CLIENT_STATE[key] for key in ("epoch", "best", "seen")}
    scheduler = client["lr_scheduler"]
    assert scheduler["last_epoch"] == 3 if stage == "stage2" else scheduler == {"last_batch_iteration": 2}


@pytest.mark.parametrize("stage", STAGES)
def test_every_parameter_is_as_of_the_last_step(stage: str) -> None:
    checkpoint = open_deepspeed_folder(SAMPLES / stage / TAG)
    for name in TRAINED:
        step = whole(checkpoint, f"optim.state.{name}.step")
        assert step.dtype == torch.int64 and step.shape == () and step.item() == 3


def test_tensors_that_were_on_nvme_are_read_where_they_were_copied_to(tmp_path: Path) -> None:
    tag = copy_of("stage3", tmp_path)
    to_nvme(tag)
    assert_holds(open_deepspeed_folder(tag), EXPECTED["stage3"])


def test_a_swap_file_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    tag = copy_of("stage3", tmp_path)
    to_nvme(tag)
    victim = sorted((tag / "offloaded_tensors" / "rank01").iterdir())[0]
    data = victim.read_bytes()
    victim.write_bytes(data[:8])
    with pytest.raises(ConfigError, match=f"{victim.name}.*expected at least"):
        open_deepspeed_folder(tag)
    victim.unlink()
    with pytest.raises(ConfigError, match=f"rank01/{victim.name}: missing"):
        open_deepspeed_folder(tag)


def test_only_folders_of_tags_are_deepspeeds(tmp_path: Path) -> None:
    assert all(is_deepspeed_folder(SAMPLES / stage / TAG) for stage in STAGES)
    assert not is_deepspeed_folder(SAMPLES / "stage1") and not is_deepspeed_folder(tmp_path)
    assert not is_deepspeed_folder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="something that is not a folder"):
        open_deepspeed_folder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"expected \*zero_pp_rank_0"):
        open_deepspeed_folder(tmp_path)


FILES = [(stage, path.name) for stage in STAGES for path in sorted((SAMPLES / stage / TAG).glob("*.pt"))]


@pytest.mark.parametrize(("stage", "name"), FILES)
def test_a_file_that_is_missing_or_cut_short_is_named(stage: str, name: str, tmp_path: Path) -> None:
    tag = copy_of(stage, tmp_path)
    data = (tag / name).read_bytes()
    for kept in (0, len(data) // 2, len(data) - 1):
        (tag / name).write_bytes(data[:kept])
        with pytest.raises(ConfigError, match=f"{name}: expected the (optimizer|model) states of rank"):
            open_deepspeed_folder(tag)
    (tag / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: missing; expected"):
        open_deepspeed_folder(tag)


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_of_another_kind_is_named(stage: str, tmp_path: Path) -> None:
    tag = copy_of(stage, tmp_path)
    optim, model = optim_file(tag).read_bytes(), model_file(tag).read_bytes()
    optim_file(tag).write_bytes(model)
    with pytest.raises(ConfigError, match=f"{optim_file(tag).name}: expected a dict with optimizer_state_dict"):
        open_deepspeed_folder(tag)
    optim_file(tag).write_bytes(optim)
    model_file(tag).write_bytes(optim)
    with pytest.raises(ConfigError, match=f"{model_file(tag).name}: expected a dict with module"):
        open_deepspeed_folder(tag)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_says_where(tmp_path: Path) -> None:
    tag = copy_of("stage1", tmp_path)
    checkpoint = open_deepspeed_folder(tag)
    optim_file(tag, 1).write_bytes(b"")
    with pytest.raises(StorageError, match=r"rank_1_mp_rank_00_optim_states\.pt"):
        checkpoint.source.read("model.second.weight", 0, 30)
    optim_file(tag, 1).unlink()
    with pytest.raises(StorageError, match="No such file"):
        checkpoint.source.read("model.second.weight", 0, 30)


def set_in(*keys: Any, value: Any) -> Any:
    def edit(contents: dict[str, Any]) -> None:
        inner: Any = contents
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return edit


def shorten(contents: dict[str, Any]) -> None:
    saved = contents["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in saved else "single_partition_of_fp32_groups"
    saved[key][0] = saved[key][0][:-1].clone()


def later(contents: dict[str, Any]) -> None:
    saved = contents["optimizer_state_dict"]
    states = saved["optimizer_state_dict" if "fp32_flat_groups" in saved else "base_optimizer_state"]["state"]
    states[0]["step"] = states[0]["step"] + 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (shorten, "weights of group 0: expected at least"),
        (later, "is from step 4.*not written together"),
        (set_in("optimizer_state_dict", "partition_count", value=3), "is from another run"),
        (set_in("optimizer_state_dict", "partition_count", value=[2, 1]), "expert parallelism"),
        (set_in("optimizer_state_dict", "ds_zero_partition_groups", value=[]), "AutoEP"),
    ],
)
def test_a_rank_that_does_not_fit_the_others_is_named(stage: str, edit: Any, said: str, tmp_path: Path) -> None:
    tag = copy_of(stage, tmp_path)
    change(optim_file(tag, 1), edit)
    with pytest.raises(ConfigError, match=f"(?s)rank_1_mp_rank_00_optim_states.pt.*{said}"):
        open_deepspeed_folder(tag)


def test_files_of_two_runs_in_one_folder_are_found(tmp_path: Path) -> None:
    for stage, other, name, said in (
        (
            "stage1",
            "stage2",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "expected the files of one run, found those of several",
        ),
        ("stage2", "stage2", "zero_pp_rank_2_mp_rank_00_optim_states.pt", "found more: zero_pp_rank_2"),
        ("stage2", "stage2", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("stage2", "stage2", "layer_00-model_states.pt", "pipeline parallelism"),
    ):
        tag = copy_of(stage, tmp_path / name)
        (tag / name).write_bytes(optim_file(SAMPLES / other / TAG).read_bytes())
        with pytest.raises(ConfigError, match=said):
            open_deepspeed_folder(tag)
    tag = copy_of("stage3", tmp_path)
    change(model_file(tag, 1), set_in("global_steps", value=4))
    with pytest.raises(ConfigError, match=r"is from step 4.*not written together"):
        open_deepspeed_folder(tag)


def test_a_frozen_parameter_that_was_on_nvme_is_named(tmp_path: Path) -> None:
    tag = copy_of("stage3", tmp_path)
    change(model_file(tag, 1), set_in("frozen_param_fragments", "base.bias", value=torch.empty(0)))
    with pytest.raises(ConfigError, match=r"rank_1.*base.bias: expected 3 elements.*got 0"):
        open_deepspeed_folder(tag)


def test_parameters_without_elements_have_their_own_shapes(tmp_path: Path) -> None:
    """DeepSpeed takes them for tied: they have one address. What a module adds of its own is no parameter."""

    def add(contents: dict[str, Any]) -> None:
        contents["module"].update(nothing=torch.empty(0, 3), void=torch.empty(0, 5))
        contents["module"]["norm._extra_state"] = torch.ones(2)
        contents["shared_params"]["void"] = "nothing"

    tag = copy_of("stage1", tmp_path)
    change(model_file(tag), add)
    checkpoint = open_deepspeed_folder(tag)
    assert [whole(checkpoint, f"model.{name}").shape for name in ("nothing", "void")] == [(0, 3), (0, 5)]
    assert checkpoint.state["aliases"] == {"head.weight": "embedding.weight"}
    assert "model.norm._extra_state" not in checkpoint.source.tensors
    assert_holds(checkpoint, EXPECTED["stage1"])


def test_steps_are_found_wherever_an_optimizer_keeps_them(tmp_path: Path) -> None:
    """Fused Adam keeps them in the param group."""

    def fused(contents: dict[str, Any]) -> None:
        base = contents["optimizer_state_dict"]["base_optimizer_state"]
        for place, group in enumerate(base["param_groups"]):
            group["step"] = int(base["state"][place].pop("step"))

    tag = copy_of("stage1", tmp_path)
    for rank in (0, 1):
        change(optim_file(tag, rank), fused)
    checkpoint = open_deepspeed_folder(tag)
    assert_holds(checkpoint, EXPECTED["stage1"])
    assert whole(checkpoint, "optim.state.scale.step").item() == 3
    assert all("step" not in group for group in checkpoint.state["groups"])


def test_the_loss_scale_of_an_fp16_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the object that DeepSpeed pickles, which is not loaded."""
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    scaler_class = type("DynamicLossScaler", (), {"__module__": module.__name__})
    module.DynamicLossScaler = scaler_class  # type: ignore[attr-defined]
    scaler = scaler_class()
    scaler.__dict__.update(cur_scale=4096.0, cur_iter=7, last_overflow_iter=5, dtype=torch.float16)
    tag = copy_of("stage2", tmp_path)
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    for rank in (0, 1):
        change(optim_file(tag, rank), set_in("optimizer_state_dict", "loss_scaler", value=scaler))
    monkeypatch.undo()
    change(
        model_file(tag),
        lambda contents: contents["module"].update(
            {name: value.half() for name, value in contents["module"].items() if value.is_floating_point()}
        ),
    )
    checkpoint = open_deepspeed_folder(tag)
    assert checkpoint.state["loss_scaler"] == scaler.__dict__
    assert checkpoint.state["dtypes"]["first.weight"] == "float16"
    assert checkpoint.source.tensors["model.base.weight"].dtype == torch.float16
    trained = {f"model.{name}": EXPECTED["stage2"][f"model.{name}"] for name in TRAINED}
    assert_holds(checkpoint, trained)


def test_a_class_that_is_not_loaded_in_the_client_state_is_named_and_the_values_are_read(tmp_path: Path) -> None:
    tag = copy_of("stage1", tmp_path)
    change(model_file(tag), set_in("helper", value=Helper()))
    checkpoint = open_deepspeed_folder(tag)
    assert_holds(checkpoint, EXPECTED["stage1"])
    with pytest.raises(ConfigError, match=rf"client_state\['helper'\]: an object of class {__name__}.Helper"):
        checkpoint.client(False)


class Helper:
    """Somebody's own."""


def test_of_another_optimizer_the_weights_are_read(tmp_path: Path) -> None:
    def momentum(contents: dict[str, Any]) -> None:
        for state in contents["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"]

    tag = copy_of("stage1", tmp_path)
    for rank in (0, 1):
        change(optim_file(tag, rank), momentum)
    checkpoint = open_deepspeed_folder(tag)
    assert not [name for name in checkpoint.source.tensors if name.startswith("optim.")]
    weights = {name: value for name, value in EXPECTED["stage1"].items() if name.startswith("model.")}
    assert_holds(checkpoint, weights)


def test_moments_that_were_kept_narrow_are_read_as_fp32(tmp_path: Path) -> None:
    def narrow(contents: dict[str, Any]) -> None:
        for state in contents["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = state[kind].bfloat16()

    tag = copy_of("stage1", tmp_path)
    for rank in (0, 1):
        change(optim_file(tag, rank), narrow)
    rounded = {
        name: value.bfloat16().float() if name.startswith("optim.") else value
        for name, value in EXPECTED["stage1"].items()
    }
    assert_holds(open_deepspeed_folder(tag), rounded)
