"""`zero run --autotuning`: the script itself runs under several configurations, and the best is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from offload.errors import ConfigError
from zero.launch.arguments import add_arguments
from zero.tools import autotuning, cli
from zero.tools.autotuning import find_config, tune, value_of, with_argument
from zero.tools.tune_search import with_batch, with_tiers

SCRIPT = """
import argparse
import torch
import zero

args = zero.add_config_arguments(argparse.ArgumentParser())
args.add_argument("--local_rank", type=int, default=0)
args.add_argument("--rows", type=int, default=0)
args = args.parse_args()
engine, *_ = zero.initialize(args=args, model=torch.nn.Linear(16, 16))
for _ in range(6):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(torch.ones(args.rows or engine.train_micro_batch_size_per_gpu(), 16)).sum()
        engine.backward(loss)
        engine.step()
print("trained to the end")
"""
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}},
}
Write = Callable[..., list[str]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """The words of a command in an empty folder, with a script and a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def write(*script_words: str, base: dict[str, Any] = BASE, **block: Any) -> list[str]:
        Path("ds.json").write_text(json.dumps({**base, "autotuning": block}))
        return ["train.py", "--deepspeed_config", "ds.json", *script_words]

    return write


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--autotuning", "tune", *words])


class Pretended:
    """Stands for runs: what is measured follows from the configuration and the script's arguments."""

    def __init__(self, measure: Callable[[dict[str, Any], list[str]], dict[str, Any] | str]) -> None:
        self.measure = measure
        self.ran: list[tuple[str, list[str]]] = []

    def __call__(self, runs: Any, folder: Path, words: list[str]) -> str:
        config = json.loads(Path(words[words.index("--deepspeed_config") + 1]).read_text())
        self.ran.append((folder.name, words))
        found = self.measure(config, words)
        if isinstance(found, str):
            return found
        own = config["train_micro_batch_size_per_gpu"]
        text = json.dumps({"peak_bytes": 1000, "micro_batch": found["rows"] if own == "auto" else own, **found})
        Path(config["autotuning"]["metric_path"]).write_text(text)
        return ""


def pretend(monkeypatch: pytest.MonkeyPatch, measure: Callable[[dict[str, Any], list[str]], Any]) -> Pretended:
    runs = Pretended(measure)
    monkeypatch.setattr(autotuning.TrialRunner, "run_job", lambda self, folder, words: runs(self, folder, words))
    return runs


def tiers(config: dict[str, Any]) -> tuple[str, str]:
    block = config["zero_optimization"]
    return block["offload_param"]["device"], block["offload_optimizer"]["device"]


def follows(seconds_of: Callable[[tuple[str, str], int], float]) -> Callable[[dict[str, Any], list[str]], Any]:
    """A script that takes its micro-batch from the configuration."""

    def measure(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
        micro = config["train_micro_batch_size_per_gpu"]
        samples = config.get("train_batch_size", micro)
        return {"seconds": seconds_of(tiers(config), micro), "samples": samples, "rows": micro}

    return measure


# ---- the search ----------------------------------------------------------------------------------------------------


def test_the_placement_that_runs_best_is_written_with_the_micro_batch_that_pays(
    job: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 samples take twice what 4 take; NVMe is not named, so it is not tried."""
    took = {("none", "none"): {2: 4.0}, ("cpu", "cpu"): {2: 3.0, 4: 4.0, 8: 7.9}}
    runs = pretend(monkeypatch, follows(lambda places, micro: took[places][micro]))
    words = tune(parsed(job("--rows=0")))
    assert [name for name, _ in runs.ran] == ["given_mbs2", "cpu-cpu_mbs2", "cpu-cpu_mbs4", "cpu-cpu_mbs8"]
    best = Path("autotuning_results/ds_config_optimal.json")
    written = json.loads(best.read_text())
    assert words == ["--deepspeed_config", str(best), "--rows=0"]
    assert written["train_micro_batch_size_per_gpu"] == 4 and tiers(written) == ("cpu", "cpu")
    assert written["optimizer"] == BASE["optimizer"] and "autotuning" not in written


def test_what_does_not_run_is_left_out(job: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three of four placements; the one that is left keeps its micro-batch when a larger one fails too."""

    def measure(config: dict[str, Any], words: list[str]) -> dict[str, Any] | str:
        micro = config["train_micro_batch_size_per_gpu"]
        fits = "nvme" in tiers(config) and micro == 2
        return {"seconds": 1.0, "samples": micro, "rows": micro} if fits else "out of memory"

    runs = pretend(monkeypatch, measure)
    block = {**BASE["zero_optimization"], "offload_optimizer": {"device": "none", "nvme_path": str(tmp_path)}}
    tune(parsed(job(base={**BASE, "zero_optimization": block})))
    names = [name for name, _ in runs.ran]
    assert names == ["given_mbs2", "cpu-cpu_mbs2", "cpu-nvme_mbs2", "nvme-nvme_mbs2", "cpu-nvme_mbs4"]
    written = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert tiers(written) == ("cpu", "nvme") and written["train_micro_batch_size_per_gpu"] == 2
    assert written["zero_optimization"]["offload_optimizer"]["nvme_path"] == [str(tmp_path)]


def test_nothing_that_runs_is_an_error_that_says_where_to_look(job: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda config, words: "no memory")
    with pytest.raises(
        ConfigError, match=r"train.py did not run with any configuration; see the output of the runs in autotuning_exps"
    ):
        tune(parsed(job()))
    assert not Path("autotuning_results").exists()


@pytest.mark.parametrize(
    ("block", "micro_batches"),
    [
        ({"num_tuning_micro_batch_sizes": 1}, [2]),
        ({"num_tuning_micro_batch_sizes": 3}, [2, 4, 8]),
        ({"metric": "latency"}, [2]),
        ({"min_train_micro_batch_size_per_gpu": 3, "max_train_micro_batch_size_per_gpu": 6}, [3, 6]),
    ],
)
def test_the_micro_batch_keeps_to_its_limits(
    job: Write, monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], micro_batches: list[int]
) -> None:
    runs = pretend(monkeypatch, follows(lambda places, micro: 1.0 if places == ("none", "none") else 2.0))
    tune(parsed(job(**block)))
    tried = [int(name.partition("_mbs")[2]) for name, _ in runs.ran if name.startswith("given")]
    assert tried == micro_batches


def test_the_samples_of_a_step_stay_and_accumulation_follows(job: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger micro-batch wins by seconds, since the samples are the same."""
    base = {**BASE, "train_batch_size": 16, "gradient_accumulation_steps": 8}
    pretend(monkeypatch, follows(lambda places, micro: 16 / micro))
    tune(parsed(job(base=base, num_tuning_micro_batch_sizes=2)))
    written = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert written["train_batch_size"] == 16 and written["train_micro_batch_size_per_gpu"] == 4
    assert "gradient_accumulation_steps" not in written
    assert with_batch({"gradient_accumulation_steps": 8}, 4)["gradient_accumulation_steps"] == 8


# ---- the micro-batch of the script ---------------------------------------------------------------------------------


def test_a_script_with_a_micro_batch_of_its_own_is_not_taken_for_faster(
    job: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
        return {"seconds": 1.0, "samples": config["train_micro_batch_size_per_gpu"], "rows": 2}

    pretend(monkeypatch, measure)
    tune(parsed(job("--rows", "2")))
    assert "the script uses another micro-batch than the one that is tried" in capsys.readouterr().out
    written = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize("words", [("--rows", "2"), ("--rows=2",), ()])
def test_its_argument_is_named_in_the_block(
    job: Write, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def measure(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
        assert config["train_micro_batch_size_per_gpu"] == "auto"
        rows = int(value_of(words, "rows") or 0)
        return {"seconds": 1.0, "samples": rows, "rows": rows}

    pretend(monkeypatch, measure)
    mappings = {"train_micro_batch_size_per_gpu ": "rows"}  # with DeepSpeed's blank and without dashes
    block = {"arg_mappings": mappings, "num_tuning_micro_batch_sizes": 2}
    found = tune(parsed(job(*words, base={**BASE, "train_micro_batch_size_per_gpu": "auto"}, **block)))
    assert value_of(found, "--rows") == ("4" if words else "2")


def test_without_it_the_micro_batch_stays(
    job: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = pretend(monkeypatch, lambda config, words: {"seconds": 1.0, "samples": 8, "rows": 8})
    tune(parsed(job(base={**BASE, "train_micro_batch_size_per_gpu": "auto"})))
    told = capsys.readouterr().out
    assert len(runs.ran) == 2 and "unless autotuning.arg_mappings names the argument" in told
    assert told.count(", micro-batch 8: ") == 2


def test_an_argument_that_does_not_act_is_told(
    job: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it says, the script takes 8 rows."""
    pretend(monkeypatch, lambda config, words: {"seconds": 1.0, "samples": 8, "rows": 8})
    block = {"arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}}
    with pytest.raises(ConfigError, match="did not run with any configuration"):
        tune(parsed(job("--rows=2", base={**BASE, "train_micro_batch_size_per_gpu": "auto"}, **block)))
    assert "the script uses another micro-batch than the one that is tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "argument", "found"),
    [
        (["--a", "1", "--b=2"], "--a", ["--a", "9", "--b=2"]),
        (["--a", "1", "--b=2"], "b", ["--a", "1", "--b=9"]),
        (["--a", "1"], "--c", ["--a", "1", "--c", "9"]),
        (["--ab", "1"], "--a", ["--ab", "1", "--a", "9"]),
    ],
)
def test_an_argument_is_replaced_where_it_stands(words: list[str], argument: str, found: list[str]) -> None:
    assert with_argument(words, argument, 9) == found


# ---- the configuration in the script's arguments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "index", "prefix"),
    [
        (["--deepspeed_config", "ds.json"], 1, ""),
        (["--deepspeed", "--deepspeed-config=ds.json", "--lr", "1"], 1, "--deepspeed-config="),
        (["--data", "other.json", "--deepspeed", "ds.json"], 3, ""),
        (["--config", "ds.json", "missing.json"], 1, ""),
    ],
)
def test_the_configuration_is_found(job: Write, words: list[str], index: int, prefix: str) -> None:
    job()
    Path("other.json").write_text("{}")
    found = find_config(words)
    assert (found.index, found.prefix) == (index, prefix)
    assert find_config(found.replace_value(words, "other.json")) == autotuning.ScriptArgument(
        index, prefix, "other.json"
    )


@pytest.mark.parametrize("words", [[], ["--deepspeed", "--lr"], ["ds.json", "other.json"]])
def test_none_or_several_are_refused_with_the_fix(job: Write, words: list[str]) -> None:
    job()
    Path("other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"expected one configuration .*--deepspeed_config FILE"):
        find_config(words)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"end_profile_step": 3}, "end_profile_step: expected a step after start_profile_step, which is 3"),
        ({"arg_mappings": {"a": 1}}, "arguments of the script"),
        ({"max_train_micro_batch_size_per_gpu": 1}, "expected at least 2, the first micro-batch that is tried, got 1"),
        ({"metrik": "latency"}, "the nearest known key is 'metric'"),
    ],
)
def test_a_block_that_cannot_be_is_named(job: Write, block: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tune(parsed(job(**block)))


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_is_known_again_if_asked(job: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pretend(monkeypatch, follows(lambda places, micro: 1.0))
    once = {"num_tuning_micro_batch_sizes": 1}
    tune(parsed(job(overwrite=False, **once)))
    tune(parsed(job(overwrite=False, **once)))
    assert len(runs.ran) == 2
    tune(parsed(job(overwrite=False, base={**BASE, "gradient_clipping": 1.0}, **once)))
    tune(parsed(job(**once)))
    assert len(runs.ran) == 6


def test_an_engine_measures_the_steps_and_ends_the_script(tmp_path: Path) -> None:
    block = {"metric_path": str(tmp_path / "metrics.json"), "start_profile_step": 1, "end_profile_step": 3}
    config = {**BASE, "gradient_accumulation_steps": 2, "autotuning": block}
    engine: Any = zero.initialize(model=torch.nn.Linear(16, 16), config=config)[0]

    def steps(count: int) -> None:
        for _ in range(2 * count):
            engine.backward(engine(torch.ones(2, 16, device=engine.device)).sum())
            engine.step()

    steps(2)
    assert not (tmp_path / "metrics.json").exists()
    with pytest.raises(SystemExit) as ended:
        steps(1)
    engine.close()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert (found["samples"], found["micro_batch"], found["rows"]) == (4, 2, 2)
    assert found["seconds"] > 0 and found["peak_bytes"] > 0


@pytest.mark.broad
def test_ranks_run_tuned_and_then_to_the_end(job: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """A command as a user gives it; both the run that is measured and the last one are jobs of two ranks."""
    words = job(metric="latency", start_profile_step=1, end_profile_step=2)
    assert cli.main(["run", "--num_gpus", "2", "--autotuning", "run", *words]) == 0
    told = capfd.readouterr()
    assert told.out.count("trained to the end") == 2, told
    written = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == 2
    assert json.loads(Path("autotuning_exps/given_mbs2/metrics.json").read_text())["samples"] == 4
    assert "trained to the end" not in Path("autotuning_exps/given_mbs2/stdout.log").read_text()


@pytest.mark.broad
def test_why_a_run_failed_is_said(job: Write, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("raise RuntimeError('no such data')")
    assert cli.main(["run", "--autotuning", "tune", *job()]) == 1
    told = capfd.readouterr()
    assert "RuntimeError: no such data" in told.out and "did not run with any configuration" in told.err


def test_a_script_that_ends_too_early_is_told_from_one_that_fails(
    job: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuning.TrialRunner, "run_job", lambda self, folder, words: "")
    with pytest.raises(ConfigError):
        tune(parsed(job()))
    assert "the script ended before step 5; lower autotuning.end_profile_step" in capsys.readouterr().out


@pytest.mark.parametrize("block", [None, True, {"offload_param": None, "offload_optimizer": {"pin_memory": True}}])
def test_a_block_that_is_null_or_true_is_placed_as_one_that_is_not_there(block: Any) -> None:
    placed = with_tiers({"zero_optimization": block, "memory_budget": None}, "nvme", "nvme", ["/a"])
    zero = placed["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_param"] == {"device": "nvme", "nvme_path": ["/a"]}
    assert zero["offload_optimizer"]["nvme_path"] == ["/a"] and placed["memory_budget"] == {"host": "auto"}
