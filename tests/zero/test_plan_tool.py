"""`zero plan`: the engine's own plan for a model that is never built, what a step moves, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from probe import layout_of

from offload.errors import ConfigError
from offload.io.probe import DiskSpeed
from zero.assembly.model_plan import plan_model
from zero.config import load_config
from zero.plan.machine import Machine, read_machine
from zero.plan.traffic import StepTraffic, step_traffic
from zero.tools import cli, plan_command
from zero.tools.plan_command import DEFAULT, Rates, build_on_meta, measure_update_rate, step_time

Open = Callable[..., Any]
TESTS = str(Path(__file__).parents[1])
PAIRS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"), ("none", "nvme")]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
"""70.6 billion parameters."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], str]:
    def written(name: str, content: Any) -> str:
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path / name)

    return written


@pytest.mark.parametrize(
    ("name", "pair"), [*(("gpt", pair) for pair in PAIRS), ("tied", ("nvme", "nvme")), ("lora", ("nvme", "nvme"))]
)
def test_the_plan_on_the_meta_device_is_the_plan_that_the_engine_allocates(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], name: str
) -> None:
    config = make_config(pair, nvme_path, accumulation=2, memory_budget={"host": "20MB"} if pair[0] == "nvme" else {})
    engine = open_engine(build(name), config)
    with torch.device("meta"):
        model = build(name)
    for trained, original in zip(model.parameters(), engine.module.parameters(), strict=True):
        trained.requires_grad_(original.requires_grad)
    planned = plan_model(model, load_config(config), read_machine(torch.device("cpu")), torch.device("cpu"))[1]
    assert planned.rows == engine.plan.rows
    assert (planned.sub_groups, planned.state_tiers) == (engine.plan.sub_groups, engine.plan.state_tiers)
    assert (planned.limits, planned.swap_bytes) == (engine.plan.limits, engine.plan.swap_bytes)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")], ids="-".join)
def test_the_bytes_foretold_are_those_a_steady_step_moves(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], accumulation: int
) -> None:
    engine = open_engine(build("gpt", blocks=6), make_config(pair, nvme_path, accumulation=accumulation))
    shots = []
    for step in range(4):
        for micro in range(accumulation):
            engine.backward(engine(tokens(step * accumulation + micro)))
            if micro == accumulation - 1:
                engine.synchronize()
                shots.append(engine.statistics())
            engine.step()
    foretold = step_traffic(engine.plan, layout_of(engine), on_gpu=False)
    before, after = list(pairwise(shots))[-1]
    assert after.nvme_write_bytes - before.nvme_write_bytes == foretold.nvme_write_bytes
    read = after.nvme_read_bytes - before.nvme_read_bytes
    # What is kept at the turn of a backward into the next forward is the schedule's to decide: one or two units.
    largest = max(unit.nbytes for unit in engine.units)
    assert abs(read - foretold.nvme_read_bytes) <= 2 * accumulation * largest
    assert foretold.nvme_read_bytes > 0


def test_the_command_prints_tiers_and_times(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    arguments = ["plan", "models:GPT", config, "--model-args", '{"blocks": 2}']
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "zero-infinity plan (this rank)" in out and "nvme    optimizer states" in out
    assert (
        "the disk's speed is not known: pass --probe" in out
        and "all data movement: not known, at the same time as the model's own computation" in out
    )
    assert cli.main([*arguments, "--read-rate", "2GB", "--mixed-rate", "1GB", "--update-rate", "1e8"]) == 0
    assert "the disk's speed is not known" not in (out := capsys.readouterr().out) and "all data movement: 0." in out


def test_json_holds_the_same(write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    rates = ["--read-rate", "2GB", "--mixed-rate", "1GB", "--update-rate", "1e8"]
    assert cli.main(["plan", "models:GPT", config, "--json", *rates]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == sum(p.numel() for p in build("gpt").parameters())
    assert found["total_bytes"]["nvme"] == sum(row["nbytes"] for row in found["rows"] if row["tier"] == "nvme") > 0
    step, seconds = found["step"], found["seconds"]
    passing = step["update_read_bytes"] + step["update_write_bytes"]
    assert seconds["update_disk_seconds"] == passing / 1e9
    assert seconds["expected_seconds"] == max(passing / 1e9, seconds["update_seconds"]) + seconds["fetch_seconds"]


def test_a_disk_is_measured_when_asked(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "measure_disk", lambda folder: DiskSpeed(3e9, 2e9, 4e9))
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    arguments = ["plan", "models:GPT", config, "--json", "--update-rate", "1e9", "--probe"]
    for more, expected in ([], (3e9, 4e9)), (["--read-rate", "1GB"], (1e9, 4e9)):
        assert cli.main([*arguments, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        rates = found["rates"]
        assert (rates["read_bytes_per_second"], rates["mixed_bytes_per_second"]) == expected
        assert "the disk's speed was measured just now" in found["notes"]


REFUSALS: dict[str, tuple[list[str], str]] = {
    "host": (["--host", "1KB"], "--host leaves 1,000"),
    "device": (["--device", "1KB"], "device memory, and 1,000 are free"),
    "nvme": (["--nvme", "1KB"], "bytes of NVMe, and --nvme has 1,000; add a folder to nvme_path"),
    "ranks": (["--ranks", "0"], "--world-size: expected at least 1, got 0"),
    "nodes": (["--world-size", "4", "--nodes", "3"], "--nodes: expected a divisor of 4, the number of ranks, got 3"),
    "no nodes": (["--nodes", "0"], "--nodes: expected a divisor of 1"),
    "stage": (["--stage", "4"], "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"),
    "stage and tier": (["--stage", "0"], 'expected 1, 2 or 3, because offload_optimizer.device is "nvme", got 0'),
    "arguments": (["--model-args", "[1]"], "--model-args: expected an object"),
    "callable": (["--model-args", '{"what": 1}'], "models:GPT cannot be called"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_knob(write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    options, expected = REFUSALS[case]
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    assert cli.main(["plan", "models:GPT", config, *options]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (4, 1), (4, 2)])
def test_the_plan_of_any_stage_and_number_of_ranks_is_that_of_the_planner(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str], stage: int, world_size: int, nodes: int
) -> None:
    tiers = ("none", "none" if stage == 0 else "cpu")
    content = make_config(tiers, nvme_path, accumulation=2)
    host_bytes = 64 << 30
    described = ["--host", str(host_bytes), "--device", str(host_bytes), "--stage", str(stage)]
    arguments = [*described, "--world-size", str(world_size), "--nodes", str(nodes), "--json"]
    content["zero_optimization"].pop("stage")
    assert cli.main(["plan", "models:GPT", write("ds.json", content), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    content["zero_optimization"]["stage"] = stage
    machine = Machine(host_bytes // (world_size // nodes), "--host", None, host_bytes, 0)
    with torch.device("meta"):
        model = build("gpt")
    config = load_config(content, world_size=world_size)
    plan = plan_model(model, config, machine, torch.device("cuda"), world_size)[1]
    assert [row["nbytes"] for row in found["rows"]] == [row.nbytes for row in plan.rows]


def test_a_stage_stands_in_for_a_bare_switch(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"zero_optimization": True, "optimizer": {"type": "Adam"}}
    plans = []
    for options in ([], ["--stage", "1"], ["--stage", "0"]):
        assert cli.main(["plan", "models:GPT", write("ds.json", content), "--world-size", "2", "--json", *options]) == 0
        plans.append(json.loads(capsys.readouterr().out)["rows"])
    assert plans[0] == plans[1] != plans[2]


def test_a_budget_in_the_config_is_refused_as_by_the_engine(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = make_config(("cpu", "nvme"), nvme_path, memory_budget={"host": 1000})
    assert cli.main(["plan", "models:GPT", write("ds.json", content)]) == 1
    error = capsys.readouterr().err
    assert "memory_budget.host: 1,000 bytes are too few; this model needs at least" in error
    assert error.endswith('; raise it, or set offload_param.device "nvme"\n')


def test_a_budget_that_is_too_small_on_nvme_names_a_knob_that_turns(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = make_config(("nvme", "nvme"), nvme_path, memory_budget={"host": "6MB"})
    assert cli.main(["plan", "models:GPT", write("ds.json", content)]) == 1
    assert "; raise it, or reduce the 16,777,216 bytes of I/O chunks" in capsys.readouterr().err
    content["zero_optimization"]["offload_param"] |= {"buffer_count": 2, "buffer_size": 1 << 20}
    assert cli.main(["plan", "models:GPT", write("ds.json", content)]) == 0
    content["memory_budget"]["host"] = 1000
    assert cli.main(["plan", "models:GPT", write("ds.json", content)]) == 1
    assert capsys.readouterr().err.endswith("; raise it\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("models", "module:callable"),
        ("org/no-such-model", "hf download org/no-such-model config.json"),
        ("no.such:Model", "cannot be imported"),
        ("models:Nothing", "cannot be imported"),
        ("models:tokens", "cannot be called"),
        ("models:make_config.__class__.__name__.title", "expected a torch.nn.Module, got str"),
        ("missing.json", "cannot be read"),
    ],
)
def test_what_is_no_model_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_meta(source)


@pytest.mark.parametrize(
    ("content", "message"), [({"hidden_size": 3}, "no .model_type."), ({"model_type": "nonesuch"}, "nonesuch")]
)
def test_a_json_that_is_no_models_config_is_refused(write: Any, content: Any, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message):
        build_on_meta(write("config.json", content))


def test_a_folder_and_a_cached_id_stand_for_the_config_in_them(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    hub = pytest.importorskip("huggingface_hub")
    path = write("config.json", {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 11})
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: path if name == "org/tiny" else None)
    sizes = [[p.shape for p in build_on_meta(source).parameters()] for source in (path, str(tmp_path), "org/tiny")]
    assert sizes[0] == sizes[1] == sizes[2] != []


def test_the_smallest_machine_fits_and_a_byte_less_does_not(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "models:GPT", write("ds.json", make_config(("nvme", "nvme"), nvme_path)), "--json"]
    assert cli.main([*arguments, "--host", "64GB", "--device", "24GB"]) == 0
    least = json.loads(capsys.readouterr().out)["smallest_bytes"]
    for tier in ("host", "device"):
        for short, status in ((0, 0), (1, 1)):
            sizes = {"host": "64GB", "device": "24GB", tier: str(least[tier] - short)}
            given = [word for name, size in sizes.items() for word in (f"--{name}", size)]
            assert cli.main([*arguments, *given]) == status
            capsys.readouterr()


def test_without_a_gpu_the_smallest_machine_has_the_devices_bytes_in_host_memory(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_DEVICE", "cpu")
    arguments = ["plan", "models:GPT", write("ds.json", make_config(("nvme", "nvme"), nvme_path))]
    assert cli.main([*arguments, "--host", "64GB", "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["smallest_bytes"]
    assert least["device"] == 0
    for short, status in ((0, 0), (1, 1)):
        assert cli.main([*arguments, "--host", str(least["host"] - short)]) == status
    assert "(the device is a part of the host here)" in capsys.readouterr().out


def test_choices_are_the_plans_of_configurations_with_that_change(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = make_config(("nvme", "nvme"), nvme_path)
    machine = ["--host", "64GB", "--device", "24GB", "--json"]
    assert cli.main(["plan", "models:GPT", write("ds.json", content), *machine, "--choices"]) == 0
    choices = {choice["name"]: choice for choice in json.loads(capsys.readouterr().out)["choices"]}
    content["zero_optimization"]["offload_optimizer"]["state_dtype"] = "8bit"
    assert cli.main(["plan", "models:GPT", write("8bit.json", content), *machine]) == 0
    found = json.loads(capsys.readouterr().out)
    eight = choices['offload_optimizer.state_dtype "8bit"']
    assert eight["tier_bytes"] == found["total_bytes"]
    assert eight["moved_bytes"] == found["step"]["nvme_read_bytes"] + found["step"]["nvme_write_bytes"]
    assert choices['both devices "cpu"']["tier_bytes"]["nvme"] == 0


def test_choices_without_a_configuration_are_those_of_the_default_one(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for config in ([], [write("ds.json", DEFAULT)]):
        machine = ["--host", "64GB", "--device", "24GB", "--update-rate", "1e9"]  # a measured rate differs each time
        assert cli.main(["plan", "models:GPT", *config, *machine, "--json", "--choices"]) == 0
        found.append(json.loads(capsys.readouterr().out)["choices"])
    assert found[0] == found[1]


def test_choices_have_a_time_without_a_measured_disk_and_say_that_its_speed_is_assumed(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    words = ["plan", "models:GPT", config, "--host", "64GB", "--device", "24GB", "--update-rate", "1e9", "--choices"]
    rates = {"read": 7, "mixed": 6, "copy": 25}

    def choices(*names: str) -> tuple[list[dict[str, Any]], list[str]]:
        given = [word for name in names for word in (f"--{name}-rate", f"{rates[name]}GB")]
        assert cli.main([*words, *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["choices"]
        assert cli.main([*words, *given]) == 0
        table = capsys.readouterr().out.partition("what each single change gives\n")[2]
        return found, table.splitlines()

    known, plain = choices(*rates)
    assert not any(choice["is_assumed"] for choice in known) and not any("~" in line for line in plain)
    for names in ((), ("copy",), ("read", "mixed")):
        found, lines = choices(*names)
        times = [choice["expected_seconds"] for choice in found if not choice["refusal"]]
        assert times == [choice["expected_seconds"] for choice in known if not choice["refusal"]] and all(times)
        assert not any("not known" in line for line in lines)
        assert "at assumed speeds where none is measured or given: the drive reads 7 GB/s" in lines[-1]
        marked = [line for line in lines[1:-1] if "~" in line]
        assert len(marked) == sum(choice["is_assumed"] for choice in found) + 1
        assert [line.replace("~", "").split() for line in lines[:-1]] == [line.split() for line in plain]
    assert [choice["name"] for choice in found if choice["is_assumed"]]


def test_a_choice_that_does_not_fit_says_what_it_takes(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("ds.json", make_config(("nvme", "nvme"), nvme_path))
    assert cli.main(["plan", "models:GPT", config, "--host", "17200000", "--device", "24GB", "--choices"]) == 0
    table = capsys.readouterr().out.partition("what each single change gives")[2]
    (line,) = [line for line in table.splitlines() if 'both devices "cpu"' in line]
    assert "needs at least" in line and "--host leaves 17,200,000" in line


def test_the_time_of_a_step_is_the_slower_of_disk_and_update_then_the_fetches() -> None:
    traffic = StepTraffic(60, 40, 30, 0, 0, 0, 0, 50)
    assert step_time(traffic, Rates(10.0, 20.0, 100.0, None)).expected_seconds == 100 / 20 + 30 / 10
    assert step_time(traffic, Rates(10.0, 20.0, 5.0, None)).expected_seconds == 50 / 5 + 30 / 10
    assert step_time(traffic, Rates(None, 20.0, 5.0, None)).expected_seconds is None
    on_gpu = StepTraffic(60, 40, 30, 0, 0, 700, 10, 50)
    assert step_time(on_gpu, Rates(10.0, 20.0, 5.0, 7.0)).expected_seconds == 100
    assert step_time(StepTraffic(0, 0, 0, 0, 0, 0, 0, 0), Rates(None, None, None, None)).expected_seconds == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_update_rate_can_be_measured_for_every_state_dtype(dtype: torch.dtype) -> None:
    assert measure_update_rate(dtype) > 0


MEASURED = """
import json, sys, time
sys.path[:0] = {path!r}
from zero.tools import cli, plan_command
begin = time.perf_counter()
status = cli.main(sys.argv[1:])
# Not ru_maxrss: a process that is started by vfork begins with its parent's.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([status, time.perf_counter() - begin, peak * 1024]))
"""


@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_is_planned_without_its_memory(write: Any, nvme_path: Path) -> None:
    """A bound on memory says more than a clock: fp32 values would be 282 GB, the plan takes less than 3."""
    pytest.importorskip("transformers")
    model = write("config.json", LLAMA)
    config = make_config(("nvme", "nvme"), nvme_path)
    config["zero_optimization"]["stage3_max_live_parameters"] = 5e9
    config["memory_budget"] = {"host": "48GB"}
    root = str(Path(TESTS).parent)
    arguments = ["plan", model, write("ds.json", config), "--host", "64GB", "--device", "24GB", "--nvme", "2TB"]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED.format(path=[root, TESTS]), *arguments],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=True,
    )
    status, _, peak_bytes = json.loads(ran.stdout.splitlines()[-1])
    assert status == 0, ran.stderr
    assert "config.json: 70.6 B parameters" in ran.stdout
    assert peak_bytes < 3e9


def test_room_is_looked_for_in_the_folder_of_saved_activations_too(
    write: Any, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"activation_device": "nvme", "nvme_path": str(nvme_path), "activation_bytes": "1000TB"}
    config = make_config(("none", "none"), nvme_path, activation_checkpointing=block)
    assert cli.main(["plan", "models:GPT", write("ds.json", config)]) == 1
    assert f"bytes of NVMe, and {nvme_path} has" in capsys.readouterr().err


def test_a_constructor_that_reads_values_is_planned_without_those_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of dropped paths are often made by torch.linspace; a tied weight stays one."""
    (tmp_path / "reads_values.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]\n"
        "        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
        "        self.last.weight = self.first.weight\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    register = torch.nn.Module.register_parameter
    model = build_on_meta("reads_values:Net")
    assert torch.nn.Module.register_parameter is register
    assert model.rates[-1] == pytest.approx(0.1) and model.last.weight is model.first.weight
    assert {p.device.type for p in model.parameters()} == {"meta"} and len(list(model.parameters())) == 3
