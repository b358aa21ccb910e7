"""What a live engine writes is its weights, bit for bit, whatever its stage and tier; and writing changes nothing."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from lagging import lagging_device
from models import GPT, build, lora_gpt, make_config, seeded, tokens
from pairwise import in_pairs
from probe import units_read_once
from torch import nn

import zero
from offload.errors import ConfigError, StateError, StorageError
from offload.files.weights_writer import BLOCK_BYTES, BLOCKS, WeightsWriter
from offload.io.aio import AioFault
from zero.values.reader import CHUNK_NUMEL

safetensors = pytest.importorskip("safetensors.torch")

Open = Callable[..., Any]
Values = dict[str, torch.Tensor]
NVME, DEVICE, MIXED = ("nvme", "nvme"), ("none", "none"), ("cpu", "nvme")
SAVING = {"stage3_gather_16bit_weights_on_model_save": True}


class Buffered(GPT):
    """A tied GPT with buffers of each kind, and a weight that forward itself changes."""

    def __init__(self) -> None:
        super().__init__(blocks=1, tied=True)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm.bias.clamp_(min=0.25)
        return super().forward(tokens)


def make(name: str) -> nn.Module:
    with seeded(0):
        return {"buffered": Buffered, "lora": lora_gpt}[name]() if name in ("buffered", "lora") else build(name)


def config(pair: tuple[str, str], nvme_path: Path, *, bf16: bool = True, **more: Any) -> dict[str, Any]:
    return make_config(pair, nvme_path, bf16=bf16, zero={**SAVING, **more})


def read(folder: Path) -> Values:
    """By the safetensors library; an index is held against what it names."""
    files = sorted(folder.glob("*.safetensors"))
    values: Values = {}
    for file in files:
        values |= safetensors.load_file(file)
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        told = json.loads(index.read_text())
        places = {name: file.name for file in files for name in safetensors.load_file(file)}
        assert told["weight_map"] == places
        assert told["metadata"]["total_size"] == sum(v.nbytes for v in values.values())
    return values


def same(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def stored_once(model: nn.Module) -> list[str]:
    """Names of parameters and of what else a state dict has, tied ones once."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        names += [] if id(tensor) in seen else [name]
        seen.add(id(tensor))
    return names


def kept_by(engine: Any, model: nn.Module, *, masters: bool) -> Values:
    """What is to be found in a file, asked of the engine in another way."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    wanted = {}
    with units_read_once(engine):
        for name in stored_once(model):
            if name in parameters:
                wanted[name] = engine.full_master(name) if masters else engine.full_parameter(name)
            else:
                buffer = buffers[name]
                wanted[name] = buffer.float() if masters and buffer.is_floating_point() else buffer.clone()
    return wanted


# ---- the bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "mixed", "odd_sizes", "lora", "buffered"])
@pytest.mark.parametrize("pair", [NVME, DEVICE, MIXED], ids="-".join)
def test_files_hold_weights_and_masters_and_tied_ones_once(
    open_engine: Open, nvme_path: Path, tmp_path: Path, name: str, pair: tuple[str, str]
) -> None:
    model = make(name)
    engine = open_engine(model, config(pair, nvme_path))
    train(engine, 0, 1)
    engine(tokens(7))  # its graph is dropped; what it has changed in place is kept
    assert engine.save_16bit_model(tmp_path / "bf16") and engine.save_fp32_model(
        tmp_path / "fp32", max_shard_size=9_000
    )
    same(read(tmp_path / "bf16"), kept_by(engine, model, masters=False))
    same(read(tmp_path / "fp32"), kept_by(engine, model, masters=True))
    assert os.listdir(tmp_path / "bf16") == ["model.safetensors"]
    if name == "buffered":
        assert (read(tmp_path / "bf16")["norm.bias"] >= 0.25).all()


@pytest.mark.parametrize(
    ("bf16", "more"),
    [
        (False, {"stage": 1}),
        (True, {"stage": 2}),
        (True, {"stage": 3, "stage3_param_persistence_threshold": 5_000}),
        (True, {"stage": 3, "stage3_max_live_parameters": 30_000}),
        (False, {"stage": 3, "offload_optimizer": {"state_dtype": "8bit"}}),
    ],
    ids=str,
)
def test_stage_persistence_tiles_and_state_dtype_do_not_matter(
    open_engine: Open, nvme_path: Path, tmp_path: Path, bf16: bool, more: dict[str, Any]
) -> None:
    pair = NVME if more["stage"] == 3 else ("none", "nvme")
    model = build("gpt", vocab=1_000) if "stage3_max_live_parameters" in more else build("gpt")
    engine = open_engine(model, config(pair, nvme_path, bf16=bf16, **more))
    train(engine, 0, 1)
    assert engine.save_16bit_model(tmp_path / "16") and engine.save_fp32_model(tmp_path / "32")
    same(read(tmp_path / "16"), kept_by(engine, model, masters=False))
    same(read(tmp_path / "32"), kept_by(engine, model, masters=True))


@pytest.mark.broad
@pytest.mark.parametrize("pair", [NVME, DEVICE], ids="-".join)
def test_saving_anywhere_between_calls_changes_no_bit_of_the_training(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    ends = []
    for saving in (False, True):
        model = make("lora")
        engine = open_engine(model, make_config(pair, nvme_path, accumulation=2, zero=SAVING))

        def save(saving: bool = saving, engine: Any = engine) -> None:
            if saving:
                engine.save_16bit_model(tmp_path / "out")
                engine.save_fp32_model(tmp_path / "out32")
                engine._zero3_consolidated_16bit_state_dict()

        losses = []
        for index in range(6):
            loss = engine(tokens(index))
            save()
            engine.backward(loss)
            save()
            engine.step()
            save()
            losses.append(loss.detach())
        with torch.no_grad(), engine.generation():
            losses += [engine(tokens(8)), engine(tokens(9))]
            save()
            losses.append(engine(tokens(10)))
        ends.append((kept_by(engine, model, masters=True), losses, engine.full_state("blocks.0.up.low")))
    same(ends[0][0], ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    assert all(torch.equal(torch.as_tensor(ends[0][2][key]), torch.as_tensor(ends[1][2][key])) for key in ends[0][2])


def test_frozen_parameters_can_be_left_out(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    model = make("lora")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    engine = open_engine(model, config(NVME, nvme_path))
    engine.save_16bit_model(tmp_path / "out", exclude_frozen_parameters=True)
    assert read(tmp_path / "out").keys() == trained
    found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert found.keys() == trained == engine.module_state_dict(exclude_frozen_parameters=True).keys()


def test_a_model_that_has_changed_is_written_as_it_is(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, config(NVME, nvme_path))
    train(engine, 0)
    with seeded(3):
        model.extra = nn.Linear(3, 5)
    before = model.extra.weight.detach().clone()
    engine.save_fp32_model(tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["extra.weight"], before)


@in_pairs(params=("none", "cpu", "nvme"), states=("none", "cpu", "nvme"), eager=(True, False))
def test_a_device_whose_copies_lag_gives_the_same_files(
    open_engine: Open,
    nvme_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    params: str,
    states: str,
    eager: bool,
) -> None:
    made = config((params, states), nvme_path)

    def write(out: Path) -> None:
        engine = open_engine(make("lora"), made)
        train(engine, 0)
        engine.save_16bit_model(out / "first")
        train(engine, 1)
        engine.save_fp32_model(out / "second")
        torch.save(engine._zero3_consolidated_16bit_state_dict(), out / "third")
        engine.close()

    write(tmp_path / "plain")
    with lagging_device(monkeypatch, eager=eager) as streams:
        write(tmp_path / "lagging")
    assert streams[0].outgoing.given > 0
    for part in ("first", "second"):
        same(read(tmp_path / "lagging" / part), read(tmp_path / "plain" / part))
    same(torch.load(tmp_path / "lagging" / "third"), torch.load(tmp_path / "plain" / "third"))


# ---- DeepSpeed's contract ---------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gather", "saved"), [(3, False, False), (3, True, True), (2, False, True)])
def test_weights_that_are_sliced_are_saved_only_where_the_key_says_so(
    open_engine: Open, nvme_path: Path, tmp_path: Path, stage: int, gather: bool, saved: bool
) -> None:
    zero_block = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather}
    engine = open_engine(build("gpt"), make_config(("none", "nvme"), nvme_path, zero=zero_block))
    assert engine.save_16bit_model(tmp_path / "out") is saved
    assert (tmp_path / "out").exists() is saved


@pytest.mark.parametrize(
    ("asked", "written"),
    [("pytorch_model.bin", "pytorch_model.bin"), ("mine.safetensors", "mine.safetensors"), ("own", "own.safetensors")],
)
def test_the_name_says_the_form_and_without_one_it_is_safetensors(
    open_engine: Open, nvme_path: Path, tmp_path: Path, asked: str, written: str
) -> None:
    engine = open_engine(build("gpt"), config(DEVICE, nvme_path))
    assert engine.save_fp16_model(str(tmp_path / "out"), asked)
    assert os.listdir(tmp_path / "out") == [written]
    path = tmp_path / "out" / written
    read = safetensors.load_file if written.endswith(".safetensors") else partial(torch.load, weights_only=True)
    same(read(path), kept_by(engine, engine.module, masters=False))
    for wrong in ("a/b.safetensors", ""):
        with pytest.raises(ConfigError, match="save_filename"):
            engine.save_16bit_model(tmp_path / "other", wrong)
    for size in ("many", 0):
        with pytest.raises(ConfigError, match="max_shard_size: expected"):
            engine.save_16bit_model(tmp_path / "other", max_shard_size=size)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("limit", ["5GB", "20KB"])
def test_pickled_weights_load_strictly_into_an_ordinary_model(
    open_engine: Open, nvme_path: Path, tmp_path: Path, limit: str, masters: bool
) -> None:
    """Tied parameters under all their names, as in a state dict; shards with their index; an earlier model goes."""
    model = make("buffered")
    engine = open_engine(model, config(NVME, nvme_path))
    train(engine, 0, 1)
    out = tmp_path / "out"
    save = engine.save_fp32_model if masters else engine.save_16bit_model
    save(out, "pytorch_model.bin", max_shard_size="15KB")
    save(out, "pytorch_model.bin", max_shard_size=limit)
    files = sorted(os.listdir(out))
    index = "pytorch_model.bin.index.json"
    if limit == "5GB":
        assert files == ["pytorch_model.bin"]
    else:
        count = len(files) - 1
        assert files == [*(f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin" for i in range(count)), index] and count > 1
        told = json.loads((out / index).read_text())["weight_map"]
        assert told.keys() == model.state_dict().keys()
        assert all(name in torch.load(out / file, weights_only=True) for name, file in told.items())
    found: Values = {}
    for file in set(files) - {index}:
        found |= torch.load(out / file, weights_only=True)
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    plain = make("buffered")
    plain.load_state_dict(found)
    once = {name: value for name, value in found.items() if name != "head.weight"}
    same(once, kept_by(engine, model, masters=masters))


@pytest.mark.parametrize("pair", [NVME, DEVICE], ids="-".join)
def test_a_consolidated_state_dict_is_real_copies_and_shares_what_is_tied(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    model = make("buffered")
    engine = open_engine(model, config(pair, nvme_path))
    train(engine, 0, 1)
    found = engine._zero3_consolidated_16bit_state_dict()
    assert list(found) == list(model.state_dict())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    once = {name: value for name, value in found.items() if name != "head.weight"}
    same(once, kept_by(engine, model, masters=False))
    storages = [value.untyped_storage() for value in once.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(once)
    assert all(storage.nbytes() == value.nbytes for storage, value in zip(storages, once.values(), strict=True))
    before = {name: value.clone() for name, value in found.items()}
    train(engine, 0)
    same(found, before)
    torch.save(found, tmp_path / "pickled")
    same(torch.load(tmp_path / "pickled", weights_only=True), before)
    plain = make("buffered").bfloat16()
    plain.load_state_dict(found)
    safetensors.save_model(plain, tmp_path / "by_the_library.safetensors")
    engine.close()
    assert torch.equal(found["position"], before["position"])


def test_inside_forward_or_a_gather_it_is_refused(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, config(NVME, nvme_path))
    with zero.GatheredParameters(model.head.weight), pytest.raises(StateError, match=r"saving weights in .*out"):
        engine.save_16bit_model(tmp_path / "out")
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(engine._zero3_consolidated_16bit_state_dict()))
    with pytest.raises(StateError, match="inside forward"):
        engine(tokens(0))
    assert not calls and not (tmp_path / "out").exists()


# ---- what fails -----------------------------------------------------------------------------------


def test_a_read_that_fails_leaves_the_earlier_model_and_an_engine_that_works(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    model = build("gpt")
    engine = open_engine(model, config(NVME, nvme_path))
    engine.save_fp32_model(tmp_path / "out")
    before = read(tmp_path / "out")
    train(engine, 0, 1)
    engine.synchronize()
    for skip in (0, 3):
        engine.inject(AioFault(fail_rate=1.0, ops=("read",), skip=skip))
        with pytest.raises(StorageError):
            engine.save_fp32_model(tmp_path / "out")
        engine.inject(None)
        assert os.listdir(tmp_path / "out") == ["model.safetensors"]
        same(read(tmp_path / "out"), before)
    train(engine, 2)
    engine.save_fp32_model(tmp_path / "out")
    same(read(tmp_path / "out"), kept_by(engine, model, masters=True))


def test_a_folder_that_cannot_be_made_is_named(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    engine = open_engine(build("gpt"), config(DEVICE, nvme_path))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        engine.save_16bit_model(tmp_path / "file" / "out")
    engine.save_16bit_model(tmp_path / "out")


def test_a_tensor_subclass_is_refused_by_name_unless_it_is_left_out(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch.testing._internal.two_tensor")
    from torch.testing._internal.two_tensor import TwoTensor

    model: Any = build("gpt", blocks=1)
    with torch.no_grad():
        halves = model.head.weight.detach().clone(), model.head.weight.detach().clone()
    model.head.weight = nn.Parameter(TwoTensor(*halves), requires_grad=False)
    engine = open_engine(model, config(DEVICE, nvme_path))
    with pytest.raises(ConfigError, match=r"head.weight: a \w*TwoTensor cannot be written"):
        engine.save_16bit_model(tmp_path / "out")
    engine.save_16bit_model(tmp_path / "out", exclude_frozen_parameters=True)
    assert "head.weight" not in read(tmp_path / "out")


# ---- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, MIXED], ids="-".join)
def test_a_tensor_of_four_chunks_is_never_in_memory(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    numel = 4 * CHUNK_NUMEL + 1_000
    model = nn.Sequential(nn.Embedding(numel // 8, 8), nn.Linear(8, 3))
    made = make_config(pair, nvme_path, zero={**SAVING, "stage3_max_live_parameters": 2 * numel})
    engine = open_engine(model, made)
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most_bytes = pieces = 0
    append = WeightsWriter.append

    def counting(self: WeightsWriter, values: torch.Tensor) -> None:
        nonlocal most_bytes, pieces
        alive.append(weakref.ref(values.untyped_storage()))
        held = [storage for reference in alive if (storage := reference()) is not None]
        most_bytes = max(most_bytes, sum(storage.nbytes() for storage in held))
        pieces += 1
        append(self, values)

    monkeypatch.setattr(WeightsWriter, "append", counting)
    engine.save_fp32_model(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 4 * 4 * CHUNK_NUMEL
    assert pieces >= 5 and most_bytes <= 2 * 4 * CHUNK_NUMEL
    assert BLOCKS * BLOCK_BYTES <= 4 * 4 * CHUNK_NUMEL
    same(read(tmp_path / "out"), kept_by(engine, model, masters=True))


# ---- and in again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(NVME, DEVICE), (DEVICE, NVME), (MIXED, MIXED)])
def test_what_is_written_loads_into_another_engine_and_moments_begin_anew_or_stay(
    open_engine: Open, nvme_path: Path, tmp_path: Path, source: tuple[str, str], target: tuple[str, str]
) -> None:
    first_model, second_model = make("buffered"), build("gpt")
    first = open_engine(first_model, config(source, nvme_path))
    train(first, 0, 1)
    first.save_fp32_model(tmp_path / "out", max_shard_size="20KB")
    wanted = kept_by(first, first_model, masters=True)
    first.close()
    with seeded(9):
        second_model = Buffered()
    second = open_engine(second_model, config(target, nvme_path))
    train(second, 0)
    before = second.full_state("blocks.0.up.weight")
    assert zero.load_pretrained(second, tmp_path / "out") == ([], [])
    same(kept_by(second, second_model, masters=True), wanted)
    after = second.full_state("blocks.0.up.weight")
    assert before["step"] == after["step"] == 1 and torch.equal(before["exp_avg"], after["exp_avg"])
    third_model = make("buffered")
    with zero.Init(config_dict_or_path=config(target, nvme_path)):
        third_model = Buffered()
    zero.load_pretrained(third_model, tmp_path / "out")
    third = open_engine(third_model, config(target, nvme_path))
    same(kept_by(third, third_model, masters=True), wanted)
    fresh = third.full_state("blocks.0.up.weight")
    assert fresh["step"] == 0 and not fresh["exp_avg"].any() and not fresh["exp_avg_sq"].any()
    train(third, 0)
