"""What DeepSpeed saved goes into this engine at any stage, tier and number of ranks, and training goes on from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed_sample as sample
import pytest
import torch
from deepspeed_craft import SAMPLES, STAGES, TAG, change, copy_of, model_file, to_nvme
from models import make_config, trainability
from ranks import RankPool
from reference import Hyper, Reference, State, differences, snapshot
from safetensors.torch import load_file

from offload.errors import ConfigError

Pool = Callable[[int], RankPool]
PLACES = (
    (0, "none", "none"),
    (1, "none", "cpu"),
    (2, "none", "nvme"),
    (3, "none", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)
"""Stage, and tier of parameters and states."""
STEPS = 3


class Recording:
    """A scheduler that only remembers, for the state of a class that is DeepSpeed's."""

    state: Any = None

    def step(self) -> None:
        """Nothing changes."""

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def is_bf16(name: str) -> bool:
    return name != "stage2"


def accumulation(name: str) -> int:
    return 1 if is_bf16(name) else 2


def scheduler_of(name: str) -> Any:
    if is_bf16(name):
        return Recording()
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


@contextlib.contextmanager
def engine_at(name: str, place: tuple[int, str, str], nvme_path: Path) -> Iterator[Any]:
    """With weights that are not the sample's."""
    import zero

    stage, params, states = place
    zero_block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = make_config(
        (params, states),
        nvme_path,
        accumulation=accumulation(name),
        clipping=sample.CLIPPING,
        bf16=is_bf16(name),
        optimizer={"type": "AdamW", "params": dict(sample.OPTIMIZER)},
        zero=zero_block,
    )
    if stage < 3:
        del config["zero_optimization"]["offload_param"]
    if states == "none":
        del config["zero_optimization"]["offload_optimizer"]
    model = sample.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    engine = zero.initialize(
        model=model, model_parameters=sample.groups(model), config=config, lr_scheduler=scheduler_of(name)
    )[0]
    with engine:
        yield engine


def continued(name: str, engine: Any) -> Reference:
    """The slow trainer, with what DeepSpeed held."""
    held = load_file(SAMPLES / name / "expected.safetensors")
    model = sample.build()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if f"model.{key}" in held:
                value.copy_(held[f"model.{key}"])
    reference = Reference(model, lambda key: Hyper(), is_bf16(name), sample.CLIPPING, accumulation(name))
    for key in reference.states:
        exp_avg, exp_avg_sq = (held[f"optim.state.{key}.{kind}"].clone() for kind in ("exp_avg", "exp_avg_sq"))
        reference.states[key] = State(held[f"model.{key}"].clone(), exp_avg, exp_avg_sq, 3)
    return reference


def hyper_of(engine: Any, model: torch.nn.Module, key: str) -> Hyper:
    """Of the engine's param group that has the parameter of that name."""
    number = next(
        i for i, group in enumerate(sample.groups(model)) if any(p is model.get_parameter(key) for p in group["params"])
    )
    group = engine.optimizer.param_groups[number]
    return Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"])


def train(trainer: Any, count: int, first: int = 0) -> list[float]:
    losses = []
    for index in range(first, first + count):
        loss = trainer(sample.batch(index, 0))
        trainer.backward(loss)
        trainer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", STAGES)
def test_training_goes_on_from_what_deepspeed_held(name: str, place: tuple[int, str, str], nvme_path: Path) -> None:
    with engine_at(name, place, nvme_path) as engine:
        path, client_state = engine.load_checkpoint(SAMPLES / name)
        assert path == str(SAMPLES / name / TAG)
        assert client_state["epoch"] == 3 and torch.equal(client_state["generator"], sample.CLIENT_STATE["generator"])
        names = trainability(engine.module)
        reference = continued(name, engine)
        assert differences(snapshot(engine, names), snapshot(reference, names)) == []
        for key, buffer in reference.model.named_buffers():
            assert torch.equal(engine.module.get_buffer(key), buffer), key
        assert (engine.global_steps, engine.micro_steps) == (3, 3 * accumulation(name))
        saved = torch.load(model_file(SAMPLES / name / TAG), map_location="cpu", weights_only=False)
        assert engine.global_samples == saved["global_samples"] > 0
        for _ in range(STEPS):
            at = engine.micro_steps
            # Rates are those of this step, also where a scheduler changes them at its end.
            fixed = {key: hyper_of(engine, reference.model, key) for key in reference.states}
            reference.hyper_of = fixed.__getitem__
            assert train(engine, accumulation(name), at) == train(reference, accumulation(name), at)
            assert differences(snapshot(engine, names), snapshot(reference, names)) == []


@pytest.mark.parametrize("name", STAGES)
def test_rates_and_scheduler_are_as_they_were(name: str, nvme_path: Path) -> None:
    with engine_at(name, (3, "none", "none"), nvme_path) as engine:
        engine.load_checkpoint(SAMPLES / name)
        groups = engine.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        if is_bf16(name):
            assert [group["lr"] for group in groups] == [0.002, 0.002]
            assert engine.lr_scheduler.state == {"last_batch_iteration": 2}
        else:
            assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.002])
            assert engine.lr_scheduler.last_epoch == 3
            train(engine, 2)
            assert [group["lr"] for group in groups] == pytest.approx([0.0001, 0.0002])


def test_weights_alone_are_loaded_where_asked_for(nvme_path: Path) -> None:
    with engine_at("stage3", (3, "none", "none"), nvme_path) as engine:
        engine.load_checkpoint(SAMPLES / "stage3", load_module_only=True)
        held = load_file(SAMPLES / "stage3" / "expected.safetensors")
        assert torch.equal(engine.full_master("first.weight"), held["model.first.weight"])
        assert (engine.global_steps, engine.lr_scheduler.state) == (0, None)
        assert not engine.full_state("first.weight")["exp_avg"].any()


def test_of_a_bf16_run_an_fp32_engine_gets_the_masters(nvme_path: Path) -> None:
    with engine_at("stage2", (3, "cpu", "cpu"), nvme_path) as engine:
        engine.load_checkpoint(SAMPLES / "stage1", load_lr_scheduler_states=False)
        held = load_file(SAMPLES / "stage1" / "expected.safetensors")
        for key, _ in trainability(engine.module):
            assert torch.equal(engine.full_parameter(key), held[f"model.{key}"].float()), key


def test_states_that_were_on_nvme_go_into_an_engine(nvme_path: Path, tmp_path: Path) -> None:
    to_nvme(copy_of("stage3", tmp_path))
    with engine_at("stage3", (3, "none", "cpu"), nvme_path) as engine:
        engine.load_checkpoint(tmp_path / "stage3", TAG)
        names = trainability(engine.module)
        assert differences(snapshot(engine, names), snapshot(continued("stage3", engine), names)) == []


def test_frozen_parameters_that_were_left_out_keep_their_values(nvme_path: Path, tmp_path: Path) -> None:
    def leave_out(contents: dict[str, Any]) -> None:
        contents["frozen_param_shapes"] = contents["frozen_param_fragments"] = None
        del contents["module"]["base.weight"], contents["module"]["base.bias"]

    tag = copy_of("stage3", tmp_path)
    for rank in (0, 1):
        change(model_file(tag, rank), leave_out)
    with engine_at("stage3", (3, "none", "none"), nvme_path) as engine:
        before = engine.full_parameter("base.weight")
        engine.load_checkpoint(tmp_path / "stage3")
        assert torch.equal(engine.full_parameter("base.weight"), before)


def test_a_damaged_folder_changes_nothing(nvme_path: Path, tmp_path: Path) -> None:
    tag = copy_of("stage1", tmp_path)
    victim = sorted(tag.glob("*rank_1*optim_states.pt"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    with engine_at("stage1", (2, "none", "none"), nvme_path) as engine:
        names = trainability(engine.module)
        before = snapshot(engine, names)
        with pytest.raises(ConfigError, match=victim.name):
            engine.load_checkpoint(tmp_path / "stage1")
        assert differences(snapshot(engine, names), before) == []


def loaded_on_a_rank(name: str, place: tuple[int, str, str], nvme_path: str) -> list[str]:
    """What differs from what DeepSpeed held, on one of several ranks."""
    with engine_at(name, place, Path(nvme_path)) as engine:
        engine.load_checkpoint(SAMPLES / name)
        names = trainability(engine.module)
        found = differences(snapshot(engine, names), snapshot(continued(name, engine), names))
        train(engine, 2 * accumulation(name), engine.micro_steps)
        return found if engine.global_steps == 5 else [*found, "it did not go on"]


@pytest.mark.parametrize(
    ("name", "place"),
    [("stage1", (3, "nvme", "nvme")), ("stage2", (3, "none", "cpu")), ("stage3", (1, "none", "none"))],
)
def test_several_ranks_load_what_other_ranks_saved(
    name: str, place: tuple[int, str, str], rank_pool: Pool, nvme_path: Path
) -> None:
    for ranks in (2, 3):
        assert rank_pool(ranks).run(loaded_on_a_rank, name, place, str(nvme_path)) == [[]] * ranks


@pytest.mark.parametrize("name", STAGES)
def test_the_function_of_deepspeeds_name_gives_what_deepspeeds_gives(name: str) -> None:
    import zero

    ours = zero.get_fp32_state_dict_from_zero_checkpoint(SAMPLES / name)
    theirs = load_file(SAMPLES / name / "zero_to_fp32.safetensors")
    # Of stage 1 DeepSpeed's leaves out what is frozen.
    assert set(ours) - set(theirs) == ({"base.weight", "base.bias"} if name == "stage1" else set())
    for key, value in theirs.items():
        assert torch.equal(ours[key], value.to(ours[key].dtype)), key
        assert ours[key].dtype == (torch.float32 if value.is_floating_point() else value.dtype), key
