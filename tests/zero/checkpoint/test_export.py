"""Weights out of a checkpoint without its engine: exact masters, the engine's own rounding, one chunk in memory."""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_craft import SAMPLES, STAGES, TAG
from harness import train
from models import build, lora_gpt, make_config, seeded

import zero
from benchmarks.cgroup import MemoryCgroup
from offload.errors import ConfigError, StorageError
from offload.kernels import kernels
from zero.checkpoint.dcp_format import MODEL, PIECE_NUMEL
from zero.checkpoint.export import CheckpointWeights, export, resolve_dtype
from zero.checkpoint.source import OpenCheckpoint, TensorInfo
from zero.compat import to_fp32
from zero.tools.cli import main

safetensors = pytest.importorskip("safetensors.torch")

Open = Callable[..., Any]
Values = dict[str, torch.Tensor]
NVME, DEVICE = ("nvme", "nvme"), ("none", "none")
ROOT = Path(__file__).parents[3]
MADE = "zero_to_fp32.safetensors"


class InMemory:
    """A source over tensors; notes what is read, and what of it is still held by anybody."""

    def __init__(self, values: Values) -> None:
        self.values = {MODEL + name: value for name, value in values.items()}
        self.tensors: Mapping[str, TensorInfo] = {n: TensorInfo(v.shape, v.dtype) for n, v in self.values.items()}
        self.expected: list[tuple[str, int, int]] = []
        self.reads: list[tuple[str, int, int]] = []
        self.most_bytes = 0
        self._given: list[weakref.ref[torch.Tensor]] = []

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        given = self.values[name].reshape(-1)[begin:end].clone()
        self.reads.append((name, begin, end))
        self._given.append(weakref.ref(given))
        held = [tensor for reference in self._given if (tensor := reference()) is not None]
        self.most_bytes = max(self.most_bytes, sum(tensor.nbytes for tensor in held))
        return given

    def expect(self, wanted: Iterable[tuple[str, int, int]]) -> None:
        self.expected = list(wanted)

    def close(self) -> None:
        pass


def held(values: Values | InMemory, state: dict[str, Any]) -> OpenCheckpoint:
    """A checkpoint of these values."""
    source = values if isinstance(values, InMemory) else InMemory(values)
    return OpenCheckpoint(Path(), source, state)


def files_of(folder: Path) -> Values:
    return {name: value for file in folder.glob("*.safetensors") for name, value in safetensors.load_file(file).items()}


def same(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# ---- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "mixed", "odd_sizes", "lora"])
@pytest.mark.parametrize("pair", [NVME, DEVICE], ids="-".join)
def test_an_export_equals_the_engines_weights_and_masters_bit_for_bit(
    open_engine: Open, nvme_path: Path, tmp_path: Path, name: str, pair: tuple[str, str]
) -> None:
    with seeded(0):
        model = lora_gpt() if name == "lora" else build(name)
    names = [key for key, _ in model.named_parameters()]
    engine = open_engine(model, make_config(pair, nvme_path))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    weights = {key: engine.full_parameter(key) for key in names}
    masters = {key: engine.full_master(key) for key in names}
    train(engine, 0)
    engine.save_checkpoint(tmp_path / "saved", tag="two")
    newer = {key: engine.full_parameter(key) for key in names}
    engine.close()
    for checkpoint, dtype, wanted in (
        ("saved/one", "bf16", weights),
        ("saved/one", "fp32", masters),
        ("saved", "bf16", newer),
    ):
        assert main(["export", str(tmp_path / checkpoint), str(tmp_path / "out"), "--dtype", dtype]) == 0
        same(files_of(tmp_path / "out"), wanted)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--max-shard-size", "20KB"]) == 0
    same(files_of(tmp_path / "out"), newer)
    if name == "lora":
        trained = {key for key, p in model.named_parameters() if p.requires_grad}
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--exclude-frozen"]) == 0
        assert files_of(tmp_path / "out").keys() == trained


def test_halves_are_rounded_away_from_zero_in_what_is_trained_alone(tmp_path: Path) -> None:
    half = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, float("inf"), float("nan"), 3e38, 1e-45, -0.0])
    values = {"trained": half, "frozen": half, "table": half}
    state = {"parameters": ["trained", "frozen"], "frozen": ["frozen"], "buffers": ["table"], "aliases": {}}
    export(held(values, state), tmp_path, torch.bfloat16)
    found = files_of(tmp_path)
    weight, remainder = torch.empty(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int16)
    kernels.split(weight, remainder, half)
    assert torch.equal(found["trained"].view(torch.int16), weight.view(torch.int16))
    assert weight[0] == 1 + 2**-7 and found["frozen"][0] == 1
    for name in ("frozen", "table"):
        assert torch.equal(found[name].view(torch.int16), half.bfloat16().view(torch.int16))


def test_quantised_storage_and_integers_stay_what_they_are(tmp_path: Path) -> None:
    values = {
        "quant.codes": torch.arange(8, dtype=torch.uint8).view(4, 2),
        "quant.scale": torch.rand(4),
        "quant.bias": torch.rand(4),
        "plain.weight": torch.rand(4),
        "steps": torch.tensor(5),
    }
    state = {"parameters": list(values)[:4], "frozen": list(values)[:4], "buffers": ["steps"]}
    export(held(values, state), tmp_path, torch.bfloat16)
    found = files_of(tmp_path)
    kept = ("quant.codes", "quant.scale", "steps")
    wanted = {name: value if name in kept else value.bfloat16() for name, value in values.items()}
    same(found, wanted)


def test_without_the_lists_of_names_what_no_group_holds_counts_as_frozen(tmp_path: Path) -> None:
    values = {name: torch.rand(3) for name in ("a", "b", "c")}
    weights = CheckpointWeights(held(values, {"groups": [{"params": ["a"]}]}), torch.float32)
    assert [tensor.name for tensor in weights.tensors] == ["a", "b", "c"] and weights.frozen == {"b", "c"}


class Name(str):
    """It counts how often names are looked up or compared."""

    asked = 0

    def __hash__(self) -> int:
        Name.asked += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Name.asked += 1
        return super().__eq__(other)


def looks_at_names(count: int) -> int:
    """How often an export of so many parameters, and as many tied ones, looks at the name of one."""
    names = [Name(f"p{i}") for i in range(count)]
    state = {"parameters": names, "aliases": {f"tied{i}": name for i, name in enumerate(names)}}
    Name.asked = 0
    weights = CheckpointWeights(held({str(name): torch.zeros(1) for name in names}, state), torch.float32)
    assert [tensor.aliases for tensor in weights.tensors] == [(f"tied{i}",) for i in range(count)]
    return Name.asked


def test_the_work_grows_with_the_number_of_names_and_not_with_its_square() -> None:
    assert looks_at_names(200) <= 2 * looks_at_names(100)


def test_a_checkpoint_without_its_frozen_parameters_says_so(
    open_engine: Open, nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with seeded(0):
        model = lora_gpt()
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    engine = open_engine(model, make_config(NVME, nvme_path))
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 1
    assert "--exclude-frozen" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--exclude-frozen"]) == 0
    assert files_of(tmp_path / "out").keys() == trained
    assert zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved").keys() == trained


def test_there_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "nothing" in capsys.readouterr().err and os.listdir(tmp_path) == []


# ---- DeepSpeed's names ------------------------------------------------------------------------------


@pytest.fixture
def saved(open_engine: Open, nvme_path: Path, tmp_path: Path) -> tuple[Path, Values]:
    """A folder of checkpoints of a tied model, and the masters of the first of two."""
    model = build("tied")
    engine = open_engine(model, make_config(NVME, nvme_path))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saved")
    masters = {name: engine.full_master(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    train(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    return tmp_path / "saved", masters


def test_the_fp32_state_dict_is_exact_and_tied(saved: tuple[Path, Values]) -> None:
    folder, masters = saved
    found = zero.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step2")
    same(found, masters)
    assert found["head.weight"] is found["embedding.weight"]
    newest = zero.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert not torch.equal(newest["head.weight"], found["head.weight"])
    lazy = zero.get_fp32_state_dict_from_zero_checkpoint(folder / "global_step2", lazy_mode=True)
    assert {name: value.shape for name, value in lazy.items()} == {name: v.shape for name, v in masters.items()}
    for name in sorted(lazy, reverse=True):
        assert lazy[name].dtype == torch.float32 and torch.equal(lazy[name].contiguous(), masters[name])
    with pytest.raises(ConfigError, match="global_step9"):
        zero.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step9")


def test_a_lazy_state_dict_closes_its_files_when_nobody_has_it(saved: tuple[Path, Values]) -> None:
    folder, masters = saved

    def opened() -> list[str]:
        paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return [path for path in map(os.path.realpath, paths) if path.startswith(str(folder.resolve()))]

    lazy = zero.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    one = lazy.pop("head.weight")
    del lazy
    assert opened() and one.contiguous().shape == masters["head.weight"].shape, "an entry keeps them open"
    del one
    gc.collect()
    assert not opened()


def test_a_tag_is_read_as_an_engine_reads_it(saved: tuple[Path, Values]) -> None:
    """A kill between the two renames of a save leaves the old one under another name."""
    folder, masters = saved
    (folder / "global_step2").rename(folder / ".global_step2.replaced")
    same(zero.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step2"), masters)


def test_an_ordinary_model_is_filled_and_one_of_an_engine_refused(
    saved: tuple[Path, Values], open_engine: Open, nvme_path: Path
) -> None:
    folder, masters = saved
    model = build("tied", seed=4)
    assert zero.load_state_dict_from_zero_checkpoint(model, folder, tag="global_step2") is model
    same({name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}, masters)
    open_engine(model, make_config(NVME, nvme_path))
    with pytest.raises(ConfigError, match=r"keeps the values of position; use engine.load_checkpoint"):
        zero.load_state_dict_from_zero_checkpoint(model, folder)


def test_a_checkpoint_is_converted_to_files(saved: tuple[Path, Values], tmp_path: Path) -> None:
    folder, masters = saved
    out = tmp_path / "out"
    once = {name: value for name, value in masters.items() if name != "head.weight"}
    zero.convert_zero_checkpoint_to_fp32_state_dict(folder, out, "50KB", tag="global_step2")
    same(files_of(out), once)
    assert len(os.listdir(out)) > 3
    zero.convert_zero_checkpoint_to_state_dict(folder, out, dtype="torch.float16", tag="global_step2")
    same(files_of(out), {name: value.half() for name, value in once.items()})
    assert os.listdir(out) == ["model.safetensors"]
    pickled = tmp_path / "pickled"
    zero.convert_zero_checkpoint_to_fp32_state_dict(folder, pickled, tag="global_step2", safe_serialization=False)
    assert os.listdir(pickled) == ["pytorch_model.bin"]
    same(torch.load(pickled / "pytorch_model.bin", weights_only=True), masters)
    named = tmp_path / "deep" / "pytorch_model.bin"
    assert to_fp32.main([str(folder), str(named), "-t", "global_step2"]) == 0
    assert os.listdir(named.parent) == ["pytorch_model.bin"]
    same(torch.load(named, weights_only=True), masters)
    with pytest.raises(ConfigError, match="float64"):
        resolve_dtype(torch.float64)


def test_what_from_pretrained_needs_beside_weights_is_copied_from_around_the_checkpoint(
    saved: tuple[Path, Values], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = saved[0], tmp_path / "out"
    assert main(["export", str(folder), str(out)]) == 0
    assert os.listdir(out) == ["model.safetensors"] and "--model FOLDER" in capsys.readouterr().out
    around = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model")
    around = (*around, "vocab.txt", "merges.txt", "chat_template.jinja")
    for name in (*around, "optimizer.pt", "trainer_state.json", "training_args.bin"):
        (folder / name).write_text(f"around {name}")
    (folder / "global_step2" / "config.json").write_text("inside")
    assert main(["export", str(folder / "global_step2"), str(out)]) == 0
    assert set(os.listdir(out)) == {"model.safetensors", *around}
    assert (out / "config.json").read_text() == "inside" and (out / "vocab.txt").read_text() == "around vocab.txt"
    said = capsys.readouterr().out
    assert "tokenizer.json" in said and "--model" not in said
    (out / "config.json").write_text("the user's")
    assert main(["export", str(folder), str(out)]) == 0
    assert (out / "config.json").read_text() == "the user's", "what nobody has named replaces nothing"
    assert to_fp32.main([str(folder), str(tmp_path / "fp32")]) == 0
    assert set(os.listdir(tmp_path / "fp32")) == {"pytorch_model.bin", *around}
    model = tmp_path / "model"
    model.mkdir()
    assert main(["export", str(folder), str(out), "--model", str(model)]) == 1
    (model / "config.json").write_text("told")
    assert main(["export", str(folder), str(out), "--model", str(model)]) == 0
    assert (out / "config.json").read_text() == "told"
    assert main(["export", str(folder), str(model), "--model", str(model)]) == 0


def test_an_export_of_a_trainers_checkpoint_is_a_model_of_transformers(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    engine = open_engine(model, make_config(NVME, nvme_path))
    engine.save_checkpoint(tmp_path / "checkpoint-1")
    config.save_pretrained(tmp_path / "checkpoint-1")
    wanted = engine.full_parameter("lm_head.weight")
    engine.close()
    assert main(["export", str(tmp_path / "checkpoint-1"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=wanted.dtype)
    assert torch.equal(loaded.lm_head.weight, wanted)


def test_signatures_are_deepspeeds() -> None:
    theirs = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    for name in (
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_state_dict",
        "convert_zero_checkpoint_to_fp32_state_dict",
    ):
        ours, other = (inspect.signature(getattr(module, name)).parameters for module in (zero, theirs))
        assert list(ours) == list(other), name
        defaults = {key: parameter.default for key, parameter in other.items()}
        if "safe_serialization" in defaults:
            defaults["safe_serialization"] = True  # what from_pretrained looks for first
        assert {key: parameter.default for key, parameter in ours.items()} == defaults, name


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_of_deepspeed_gives_what_its_own_script_makes_of_it(stage: str, tmp_path: Path) -> None:
    theirs = safetensors.load_file(SAMPLES / stage / MADE)  # there counters are floats too
    found = zero.get_fp32_state_dict_from_zero_checkpoint(SAMPLES / stage, tag=TAG)
    # At stage 1 the script leaves out what is frozen.
    assert not theirs.keys() - found.keys() and (stage == "stage1" or not found.keys() - theirs.keys())
    same({name: found[name] for name in theirs}, {name: theirs[name].to(found[name].dtype) for name in theirs})
    aliases = {name for name in found for other in found if name > other and found[name] is found[other]}
    assert len(aliases) == 1
    assert main(["export", str(SAMPLES / stage / TAG), str(tmp_path), "--dtype", "fp32"]) == 0
    written = files_of(tmp_path)
    same(written, {name: found[name] for name in written})
    assert len(written) == len(found) - 1


# ---- memory ---------------------------------------------------------------------------------------


def test_no_more_than_a_chunk_is_held_and_what_is_read_was_announced(tmp_path: Path) -> None:
    values = {f"layer{i}": torch.rand(PIECE_NUMEL * 4 // 3 + i) for i in range(3)}
    source = InMemory(values)
    export(held(source, {}), tmp_path, torch.bfloat16, max_shard_size="9MB")
    assert source.reads == source.expected and len(source.reads) == 6
    assert source.most_bytes <= 2 * 4 * PIECE_NUMEL
    assert len(files_of(tmp_path)) == 3


def test_a_disk_without_room_is_told_before_anything_is_read(tmp_path: Path) -> None:
    source = InMemory({"huge": torch.zeros(1).expand(shutil.disk_usage(tmp_path).free)})
    with pytest.raises(StorageError, match="No space left"):
        export(held(source, {}), tmp_path, torch.float32)
    assert source.reads == [] and os.listdir(tmp_path) == []


def may_limit() -> bool:
    try:
        with MemoryCgroup(256 << 20, "zero-infinity-export-test"):
            return True
    except OSError:
        return False


WORKER = """
    import sys
    import torch, zero
    from torch import nn
    from models import make_config

    folder, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(2)
    config = make_config(("nvme", "nvme"), folder, memory_budget={"host": "150MB", "device": "60MB"})
    for key in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):
        del config["zero_optimization"][key]
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    with zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    for number, layer in enumerate(model):
        layer.requires_grad_(number % 4 == 0)
        with zero.GatheredParameters(layer.weight), torch.no_grad():
            layer.weight.fill_(1 + number / 64)
    with zero.initialize(model=model, config=config)[0] as engine:
        engine.save_16bit_model(f"{folder}/live16")
        engine.save_fp32_model(f"{folder}/live32", max_shard_size="1GB")
        engine.save_checkpoint(f"{folder}/saved")
"""


def holds_layers(folder: Path, layers: int, dtype: torch.dtype) -> None:
    names = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                value = file.get_tensor(name)
                assert value.dtype == dtype and bool((value == 1 + int(name.split(".")[0]) / 64).all())
                names.add(name)
    assert names == {f"{number}.weight" for number in range(layers)}


@pytest.mark.slow
@pytest.mark.skipif(not may_limit(), reason="no right to make a memory cgroup here")
def test_a_model_four_times_the_memory_group_is_written_live_and_exported(nvme_path: Path, tmp_path: Path) -> None:
    limit_bytes, width = 640 << 20, 2048
    layers = -(-4 * limit_bytes // (width * width * 4))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

    def within(*command: str) -> None:
        with MemoryCgroup(limit_bytes, "zero-infinity-export") as group:
            done = subprocess.run(
                [*group.prefix, sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=800,
                check=False,
            )
            told = f"{group.kills} kills, peak {group.peak_bytes}"
            assert done.returncode == 0 and group.kills == 0, f"{told}\n{done.stderr[-3000:]}"

    within("-c", textwrap.dedent(WORKER), str(nvme_path), str(width), str(layers))
    for dtype in ("fp32", "bf16"):
        within("-m", "zero", "export", str(nvme_path / "saved"), str(nvme_path / dtype), "--dtype", dtype)
    for folder, dtype in (("live16", "bf16"), ("live32", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")):
        holds_layers(nvme_path / folder, layers, resolve_dtype(dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_configuration_says_the_dtype_of_the_weights_beside_it(
    saved: tuple[Path, Values], tmp_path: Path, dtype: str
) -> None:
    """from_pretrained makes weights of the dtype in the configuration: exact masters would be rounded."""
    (tmp_path / "model").mkdir()
    told = {"dtype": "float16", "text_config": {"torch_dtype": "float16", "vocab_size": 8}, "other": [1]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(told))
    words = ["export", str(saved[0]), str(tmp_path / "out"), "--model", str(tmp_path / "model"), "--dtype", dtype]
    assert main(words) == 0
    name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    wanted = {"dtype": name, "text_config": {"torch_dtype": name, "vocab_size": 8}, "other": [1]}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == wanted
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == told
