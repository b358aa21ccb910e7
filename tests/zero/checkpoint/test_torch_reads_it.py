"""A checkpoint is one of torch.distributed.checkpoint, which plain torch reads; and what is damaged is refused."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import KINDS, VOCAB, WIDTH, Case, Training, odd, training
from probe import units_read_once
from reference import differences
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from offload.errors import ConfigError, StateError
from offload.files.durable import Files
from zero.checkpoint.dcp_format import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")


def held(run: Training) -> dict[str, torch.Tensor]:
    """What the checkpoint of a run must hold, by name; frozen weights as they are."""
    engine, tensors = run.engine, {}
    with units_read_once(engine):
        for name, trainable in run.names:
            tensors[f"model.{name}"] = engine.full_master(name) if trainable else engine.full_parameter(name)
            if trainable:
                state = engine.full_state(name)
                tensors[f"optim.state.{name}.step"] = torch.tensor(int(state["step"]))
                tensors |= {f"optim.state.{name}.{kind}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
    buffers = {f"model.{name}": b.detach().clone() for name, b in run.model.named_buffers() if name != "passing"}
    return tensors | buffers


@pytest.fixture
def saved(kind: str, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a kind of model, and what it must hold."""
    with training(Case(kind, states="cpu"), tmp_path) as run:
        for index in range(2):
            run.train(index)
        run.engine.save_checkpoint(tmp_path / "saved", "it", {"mine": [1, "two"]})
        return tmp_path / "saved" / "it", held(run)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_loads_every_tensor(saved: tuple[Path, dict[str, torch.Tensor]], kind: str) -> None:
    folder, expected = saved
    mine = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in expected.items()}
    dcp.load(mine, storage_reader=dcp.FileSystemReader(folder))
    assert differences(mine, expected) == []
    told = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    more = {name for name in told if name.startswith(("model.", "optim."))} - expected.keys()
    assert more == ({"model.head.weight"} if kind == "tied" else set())


@pytest.mark.parametrize("kind", ["tied"])
def test_plain_torch_loads_a_tied_weight_by_each_of_its_names(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = saved
    for name in ("model.table.weight", "model.head.weight"):
        mine = {name: torch.empty_like(expected["model.table.weight"])}
        dcp.load(mine, storage_reader=dcp.FileSystemReader(folder))
        assert torch.equal(mine[name], expected["model.table.weight"])


@pytest.mark.parametrize("kind", ["plain", "tied", "lora"])
def test_torchs_model_and_optimizer_go_on_from_it(saved: tuple[Path, dict[str, torch.Tensor]], kind: str) -> None:
    folder, expected = saved
    model = odd(kind, seed=8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    wanted = {"model": weights, "optim": {k: v for k, v in states.items() if k.startswith("state.")}}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder))
    states |= wanted["optim"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    for name, parameter in model.named_parameters():
        master = expected[f"model.{name}"]
        assert torch.equal(parameter.detach(), master.to(parameter.dtype)), name
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            for what in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(state[what], expected[f"optim.state.{name}.{what}"].to(state[what].dtype)), name


@pytest.mark.parametrize("kind", ["tied"])
def test_torchs_converter_makes_one_file_of_it(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, expected = saved
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    model = {f"model.{name}": value for name, value in found["model"].items()}
    assert torch.equal(model.pop("model.head.weight"), model["model.table.weight"])
    states = found["optim"]["state"].items()
    moments = {f"optim.state.{name}.{kind}": value for name, kinds in states for kind, value in kinds.items()}
    assert differences({**model, **moments}, expected) == []
    assert found["client"]["client_state"] == {"mine": [1, "two"]} and found["state"]["global_steps"] == 2


# ---- what is damaged --------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def payloads(folder: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of what is not empty in the data file."""
    boxes = read_manifest(Files(), folder).files["__0_0.distcp"].boxes
    return [(offset, nbytes) for offset, nbytes, _ in boxes if nbytes]


FILES = ("__0_0.distcp", ".metadata", "manifest.json")
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut in half": truncate,
    "one byte longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "gone": os.unlink,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, "it"; leave it as it is."""
    folder = tmp_path_factory.mktemp("good")
    with training(Case("frozen", states="nvme", groups=2), folder) as run:
        run.train(0)
        run.engine.save_checkpoint(folder / "saved", "it")
    return folder / "saved"


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A training that is somewhere else."""
    with training(Case("frozen", states="nvme", groups=2), tmp_path, seed=3) as run:
        for index in range(2):
            run.train(index)
        yield run


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_another_size_is_refused_by_name_and_nothing_changes(
    other: Training, good: Path, tmp_path: Path, damage: str
) -> None:
    before = other.state()
    for name in FILES:
        if name == "manifest.json" and damage == "one byte longer":
            continue  # a blank more is no damage
        copy = shutil.copytree(good, tmp_path / f"damaged {name}")
        DAMAGES[damage](copy / "it" / name)
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            other.engine.load_checkpoint(copy, "it")
        assert differences(other.state(), before) == [], name
    other.train(2)


def test_any_flipped_bit_of_what_says_where_things_are_is_refused_and_nothing_changes(
    other: Training, good: Path, tmp_path: Path
) -> None:
    before, chance = other.state(), random.Random(1)
    for name in (".metadata", "manifest.json"):
        for number in range(12):
            copy = shutil.copytree(good, tmp_path / f"{number} {name}")
            flip(copy / "it" / name, chance.randrange((copy / "it" / name).stat().st_size))
            with pytest.raises(ConfigError, match=r"it/?(\.metadata|manifest\.json)?"):
                other.engine.load_checkpoint(copy, "it")
    assert differences(other.state(), before) == []
    other.train(2)


@pytest.mark.parametrize("name", FILES)
def test_without_a_tag_a_damaged_checkpoint_is_followed_by_the_next_one(
    other: Training, good: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(good, tmp_path / "saves")
    other.engine.load_checkpoint(copy)
    state = other.state()
    for tag in ("two", "three"):
        other.train(1)
        other.engine.save_checkpoint(copy, tag)
    flip(copy / "two" / FILES[0], payloads(copy / "two")[0][0])
    payload = max(payloads(copy / "three"), key=lambda box: box[1])[0]
    flip(copy / "three" / name, payload if name == FILES[0] else (copy / "three" / name).stat().st_size // 2)
    with caplog.at_level("WARNING", "zero"):
        assert other.engine.load_checkpoint(copy)[0] == str(copy / "it")
    assert "loading 'it' instead" in caplog.text and f"three/{name}" in caplog.text
    assert differences(other.state(), state) == []
    flip(copy / "it" / FILES[0], payloads(copy / "it")[0][0])
    with pytest.raises(ConfigError, match=r"can be loaded.*'it' is damaged"):
        other.engine.load_checkpoint(copy)
    other.engine.load_checkpoint(good)
    other.train(1)


@pytest.mark.parametrize("only_module", [True, False])
def test_a_damaged_checkpoint_without_frozen_weights_is_followed_by_one_that_replaces_as_much(
    tmp_path: Path, only_module: bool
) -> None:
    saves = tmp_path / "saves"
    with training(Case("frozen", states="cpu"), tmp_path) as run:
        for index, tag in enumerate(("one", "two")):
            run.train(index)
            run.engine.save_checkpoint(saves, tag, exclude_frozen_parameters=True)
        of_head = [offset for offset, nbytes in payloads(saves / "two") if nbytes == 4 * VOCAB * WIDTH]
        flip(saves / "two" / FILES[0], of_head[0])
        path, _ = run.engine.load_checkpoint(saves, load_module_only=only_module)
        assert path == str(saves / "one")
        run.train(2)
        with pytest.raises(ConfigError, match="checksum"):
            run.engine.load_checkpoint(saves, "two")
        run.engine.load_checkpoint(saves, "one", load_module_only=True)
        with pytest.raises(StateError, match="failed half way"):
            run.train(3)  # moments may be mixed
        run.engine.load_checkpoint(saves, "one")
        run.train(3)


def test_a_flipped_bit_of_any_payload_is_refused_by_name(other: Training, good: Path, tmp_path: Path) -> None:
    """Values that came before it are loaded then: nothing but another load is allowed."""
    chance, refused = random.Random(2), 0
    for number, (offset, nbytes) in enumerate(chance.sample(payloads(good / "it"), 16)):
        copy = shutil.copytree(good, tmp_path / str(number))
        flip(copy / "it" / "__0_0.distcp", offset + chance.randrange(nbytes))
        with pytest.raises(ConfigError, match=r"__0_0\.distcp.*checksum"):
            other.engine.load_checkpoint(copy, "it")
        if other.engine.partially_loaded_folder:
            refused += 1
            for call in (lambda: other.train(0), lambda: other.engine.save_checkpoint(tmp_path), other.engine.step):
                with pytest.raises(StateError, match="failed half way"):
                    call()
        other.engine.load_checkpoint(good)
        assert not other.engine.partially_loaded_folder
    assert refused
    with training(other.case, tmp_path) as run:
        run.engine.load_checkpoint(good)
        assert differences(other.state(), run.state()) == []
