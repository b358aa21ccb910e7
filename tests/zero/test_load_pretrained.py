"""A safetensors checkpoint goes to where a model's values live, with its very bits, and never lies in memory."""

from __future__ import annotations

import copy
import errno
import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters
from models import build, make_config, seeded, tokens
from torch import nn

import zero
from benchmarks.cgroup import MemoryCgroup
from offload.errors import ConfigError, StateError, StorageError
from zero.params.initial_store import FileLocation
from zero.params.released_parameter import ReleasedParameter

safetensors = pytest.importorskip("safetensors.torch")

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
ROOT = Path(__file__).parents[2]


def save(model: nn.Module, folder: Path, *, shards: int = 1, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """As save_pretrained writes it: tied tensors once; the values that were written."""
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            values[name] = tensor.detach().to(cast).contiguous()
    names = list(values)
    if shards == 1:
        safetensors.save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        return values
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        safetensors.save_file({name: values[name] for name in names[number::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[number::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return values


def half_up(value: torch.Tensor) -> torch.Tensor:
    return ((value.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


# ---- the bits arrive ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shards"), [("tied", 1), ("tied", 3), ("mixed", 3), ("odd_sizes", 1)])
def test_a_model_under_init_gets_the_checkpoint_and_keeps_fp32_bits_in_its_masters(
    open_engine: Open, nvme_path: Path, tmp_path: Path, name: str, shards: int
) -> None:
    values = save(build(name, seed=5), tmp_path / "saved", shards=shards)
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = build(name, seed=6)
    assert zero.load_pretrained(model, tmp_path / "saved") == ([], [])
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters() if p.numel())
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    engine = open_engine(model, config)
    for key, value in values.items():
        if trained[key]:
            assert torch.equal(engine.full_master(key), value), key
            assert torch.equal(engine.full_parameter(key), half_up(value)), key
        else:
            assert torch.equal(engine.full_parameter(key), value.bfloat16()), key
    engine.backward(engine(tokens(0)))
    engine.step()


@pytest.mark.parametrize(
    ("pair", "persistent"), [(("none", "none"), 0), (("cpu", "nvme"), 600), (NVME, 0), (NVME, 600)]
)
def test_an_engine_takes_new_weights_and_keeps_its_states(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str], persistent: int
) -> None:
    values = save(build("mixed", seed=5), tmp_path / "saved", shards=2)
    model = build("mixed")
    config = make_config(pair, nvme_path, zero={"stage3_param_persistence_threshold": persistent})
    engine = open_engine(model, config)
    for index in range(2):
        engine.backward(engine(tokens(index)))
        engine.step()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    before = {name: engine.full_state(name) for name in trained}
    assert zero.load_pretrained(engine, tmp_path / "saved") == ([], [])
    for name, parameter in model.named_parameters():
        expected = half_up(values[name]) if parameter.requires_grad else values[name].bfloat16()
        assert torch.equal(engine.full_parameter(name), expected), name
    for name in trained:
        assert torch.equal(engine.full_master(name), values[name]), name
        state = engine.full_state(name)
        assert state["step"] == before[name]["step"]
        assert all(torch.equal(state[key], before[name][key]) for key in ("exp_avg", "exp_avg_sq")), name
    other = open_engine(build("mixed", seed=5), make_config(("none", "none"), nvme_path))
    with torch.no_grad():
        assert torch.equal(engine(tokens(3)), other(tokens(3)))


def test_part_of_a_checkpoint_leaves_the_rest_of_an_engine_alone(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    for index in range(2):
        engine.backward(engine(tokens(index)))
        engine.step()
    names = [name for name, _ in engine.module.named_parameters()]
    before = {name: engine.full_master(name) for name in names}
    safetensors.save_file(
        {"blocks.1.up.bias": torch.full((128,), 0.1), "nobody": torch.ones(2)}, tmp_path / "part.safetensors"
    )
    found = zero.load_pretrained(engine.module, tmp_path / "part.safetensors", strict=False)
    assert found.unexpected_keys == ["nobody"] and found.missing_keys == [n for n in names if n != "blocks.1.up.bias"]
    assert (engine.full_master("blocks.1.up.bias") == torch.tensor(0.1)).all()
    for name in names:
        assert name == "blocks.1.up.bias" or torch.equal(engine.full_master(name), before[name]), name


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_is_converted(open_engine: Open, nvme_path: Path, tmp_path: Path, saved: torch.dtype) -> None:
    values = save(build("gpt", seed=5), tmp_path / "saved", dtype=saved)
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = build("gpt")
    zero.load_pretrained(model, tmp_path / "saved")
    engine = open_engine(model, config)
    for name, value in values.items():
        assert torch.equal(engine.full_master(name), value.float()), name


def test_an_ordinary_model_and_its_buffers_are_filled(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3))

    with seeded(1):
        source = make()
        source(torch.randn(4, 2, 8))
    save(source, tmp_path / "saved")
    target = make()
    target[0].weight.data = torch.empty(3, 3, 2).transpose(1, 2)  # not contiguous
    assert zero.load_pretrained(target, tmp_path / "saved") == ([], [])
    for (name, ours), theirs in zip(target.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert int(target[1].num_batches_tracked) == 1  # type: ignore[arg-type]


def test_values_edited_after_the_load_are_kept_and_the_checkpoint_is_not_touched(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    values = save(build("gpt", seed=5), tmp_path / "saved")
    raw = (tmp_path / "saved" / "model.safetensors").read_bytes()
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model: Any = build("gpt")
    zero.load_pretrained(model, tmp_path / "saved")
    twin = copy.deepcopy(model.norm)
    with zero.GatheredParameters([model.norm.weight, twin.bias]), torch.no_grad():
        assert torch.equal(model.norm.weight, values["norm.weight"])
        model.norm.weight.add_(1)
        assert torch.equal(twin.bias, values["norm.bias"])
    engine = open_engine(model, config)
    assert torch.equal(engine.full_master("norm.weight"), values["norm.weight"] + 1)
    assert torch.equal(engine.full_master("norm.bias"), values["norm.bias"])
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == raw


# ---- what does not fit ----------------------------------------------------------------------------


def drop(values: dict[str, Any]) -> None:
    del values["norm.weight"]


def add(values: dict[str, Any]) -> None:
    values["lm_head.bias"] = torch.ones(3)


def reshape(values: dict[str, Any]) -> None:
    values["norm.weight"] = torch.ones(31)


def make_integer(values: dict[str, Any]) -> None:
    values["norm.weight"] = torch.ones(32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop, ["1 missing in the checkpoint: norm.weight", "strict=False"]),
        (add, ["1 not in the model: lm_head.bias", "strict=False"]),
        (reshape, ["norm.weight", "model.safetensors", "expected shape (32,)", "got (31,)", "config"]),
        (make_integer, ["norm.weight", "model.safetensors", "expected torch.", "got torch.int32", "does not convert"]),
    ],
)
@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["under init", "engine"])
def test_what_does_not_fit_is_named_and_nothing_changes(
    open_engine: Open,
    nvme_path: Path,
    tmp_path: Path,
    damage: Callable[[dict[str, Any]], None],
    words: list[str],
    wrapped: bool,
) -> None:
    values = save(build("gpt", seed=5), tmp_path / "saved")
    damage(values)
    safetensors.save_file(values, tmp_path / "saved" / "model.safetensors")
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = build("gpt")
    engine = open_engine(model, config) if wrapped else None
    with pytest.raises(ConfigError) as refused:
        zero.load_pretrained(model, tmp_path / "saved")
    assert all(word in str(refused.value) for word in [*words, str(tmp_path)]), str(refused.value)
    engine = engine or open_engine(model, config)
    for name, parameter in build("gpt").named_parameters():
        wanted = half_up(parameter.detach()) if wrapped else parameter.detach()
        assert torch.equal(engine.full_parameter(name) if wrapped else engine.full_master(name), wanted), name


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    file = folder / "model.safetensors"
    model = build("gpt")

    def refusal() -> str:
        with pytest.raises(ConfigError) as refused:
            zero.load_pretrained(model, folder)
        return str(refused.value)

    assert "expected model.safetensors" in refusal() and str(folder) in refusal()
    save(model, folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    text = refusal()
    assert "truncated" in text and f"{len(whole) - 100:,} bytes" in text and str(file) in text
    file.write_bytes(whole[:50])
    assert "truncated" in refusal()
    file.write_bytes(b"")
    assert "not a safetensors file" in refusal()
    file.write_bytes(struct.pack("<Q", 4) + b"abcd")
    assert "invalid JSON in header" in refusal()
    file.write_bytes(whole)
    rewrite_header(file, lambda header: header["norm.weight"].update(dtype="F8_E8M0", shape=[128]))
    assert "norm.weight" in refusal() and "F8_E8M0" in refusal() and "BF16" in refusal()
    for change in (
        lambda entry: entry | {"dtype": "F12"},
        lambda entry: entry | {"shape": [33]},
        lambda entry: entry | {"data_offsets": [-128, 0]},
        lambda entry: [],
        lambda entry: {key: value for key, value in entry.items() if key != "dtype"},
    ):
        file.write_bytes(whole)
        rewrite_header(
            file, lambda header, change=change: header.update({"norm.weight": change(header["norm.weight"])})
        )
        assert "not a safetensors file" in refusal() and str(file) in refusal()
    file.write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "not a safetensors file" in refusal()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    save(build("gpt"), tmp_path / "saved", shards=3)
    (index,) = (tmp_path / "saved").glob("*.index.json")
    index.write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json: not an index of safetensors"):
        zero.load_pretrained(build("gpt"), tmp_path / "saved")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(build("gpt"), tmp_path / "saved", shards=3)
    (tmp_path / "saved" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names 3 files, of which 1 are missing: model-00002-of-00003.safetensors"):
        zero.load_pretrained(build("gpt"), tmp_path / "saved")


def test_inside_a_gather_of_the_engine_it_is_refused(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    save(build("gpt", seed=5), tmp_path / "saved")
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    with zero.GatheredParameters(engine.module.head.weight), pytest.raises(StateError, match="GatheredParameters"):
        zero.load_pretrained(engine, tmp_path / "saved")


@pytest.mark.parametrize("tiers", [NVME, ("none", "cpu")], ids="-".join)
def test_after_a_load_that_failed_half_way_only_another_load_is_taken(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, str]
) -> None:
    with seeded(5):
        values = save(build("gpt"), tmp_path / "new")
    engine = open_engine(build("gpt"), make_config(tiers, nvme_path))
    reads, read = [], FileLocation.read

    def fail(source: FileLocation, begin: int, end: int) -> torch.Tensor:
        reads.append(begin)
        if len(reads) == 4:
            raise StorageError("read", errno=errno.EIO, path="a shard", offset=0, free_bytes=None)
        return read(source, begin, end)

    with monkeypatch.context() as patch:
        patch.setattr(FileLocation, "read", fail)
        with pytest.raises(StorageError):
            zero.load_pretrained(engine, tmp_path / "new")
    calls = (lambda: engine(tokens(0)), lambda: engine.save_checkpoint(tmp_path), engine.step)
    for call in calls:
        with pytest.raises(StateError, match=r"loading .*new failed half way"):
            call()
    zero.load_pretrained(engine, tmp_path / "new")
    found = masters(engine)
    assert [name for name in found if not torch.equal(found[name], values[name])] == []
    engine.backward(engine(tokens(0)))
    engine.step()


def test_a_graph_from_before_the_load_is_refused(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    save(build("gpt", seed=5), tmp_path / "saved")
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    loss = engine(tokens(0))
    zero.load_pretrained(engine, tmp_path / "saved")
    with pytest.raises(StateError, match="graph was made before"):
        engine.backward(loss)


# ---- memory ---------------------------------------------------------------------------------------

WORKER = """
    import sys
    import torch, zero
    from torch import nn
    from models import make_config

    width, layers, way = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(2)
    config = make_config(("nvme", "nvme"), sys.argv[1], memory_budget={"host": "150MB", "device": "60MB"})
    zero_block = config["zero_optimization"]
    for key in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):
        del zero_block[key]
    nn.Linear(64, 64)

    with zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    if way == "init":
        zero.load_pretrained(model, sys.argv[5])
    engine = zero.initialize(model=model, config=config)[0]
    if way == "engine":
        zero.load_pretrained(engine, sys.argv[5])
    for number in (0, layers - 1):
        assert (engine.full_master(f"{number}.weight") == (1 + number / 1024) / width).all(), number
    loss = engine(torch.ones(1, width, dtype=torch.bfloat16)).float().mean()
    engine.backward(loss)
    engine.step()
    engine.synchronize()
    assert loss.isfinite() and (engine.full_master("0.weight") != 1 / width).any()
    engine.close()
"""


def write_layers(path: Path, width: int, layers: int) -> None:
    """Layer number i multiplies what it is given by 1 + i / 1024; written one by one."""
    nbytes = width * width * 4
    header = {
        f"{i}.weight": {"dtype": "F32", "shape": [width, width], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(layers)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i in range(layers):
            file.write(torch.full((width * width,), (1 + i / 1024) / width).numpy().tobytes())


def may_limit() -> bool:
    try:
        with MemoryCgroup(256 << 20, "zero-infinity-load-test"):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not may_limit(), reason="no right to make a memory cgroup here")
@pytest.mark.parametrize("way", ["init", "engine"])
def test_a_checkpoint_four_times_larger_than_the_memory_group_loads_to_nvme_and_trains(
    nvme_path: Path, tmp_path: Path, way: str
) -> None:
    limit_bytes, width = 640 << 20, 2048
    layers = -(-4 * limit_bytes // (width * width * 4))
    file = tmp_path / "model.safetensors"
    write_layers(file, width, layers)
    assert file.stat().st_size >= 4 * limit_bytes
    with MemoryCgroup(limit_bytes, f"zero-infinity-load-{way}") as group:
        done = subprocess.run(
            [
                *group.prefix,
                *(sys.executable, "-c", textwrap.dedent(WORKER), str(nvme_path)),
                *(str(width), str(layers), way, str(file)),
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"{group.kills} kills, peak {group.peak_bytes}\n{done.stderr[-3000:]}"
        assert group.kills == 0
    file.unlink()
