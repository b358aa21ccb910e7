"""The example trains, reports what it did, and finds its size and its end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from offload.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
FIGURES = {
    *("parameters", "units", "steps", "tokens", "training_seconds", "evaluation_seconds", "step_seconds"),
    *("tokens_per_second", "forward_seconds", "backward_seconds", "optimizer_seconds", "exposed_wait_seconds"),
    *(f"{kind}_{tier}_bytes" for kind in ("planned", "measured") for tier in ("device", "host", "nvme")),
    *("nvme_read_bytes", "nvme_write_bytes", "read_gb_per_second", "write_gb_per_second", "gathers", "releases"),
    *("nvme_written_bytes_per_step", "nvme_written_bytes_per_day"),
    *("prefetch_hit_rate", "peak_rss_bytes", "validation_loss", "unigram_entropy", "bigram_entropy", "losses"),
    *("evaluated_bytes", "device", "aio_backend", "isa"),
}


@dataclass(frozen=True)
class Run:
    """A tiny run in a process of its own: where, what it reported, what it printed."""

    folder: Path
    figures: dict[str, Any]
    printed: str


def train(folder: Path, offload: str) -> Run:
    text = folder / "text"
    text.mkdir()
    for index in range(25):
        (text / f"{index:02}.txt").write_text(f"line {index} of some text\n" * 40)
    everything_moves = folder / "config.json"
    everything_moves.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    command = [
        *(sys.executable, str(ROOT / "scripts" / "train_gpt.py"), "--device", "cpu", "--offload", offload),
        *("--dtype", "bf16"),
        *("--params", "300K", "--steps", str(STEPS), "--batch", "2", "--sequence", "32", "--evaluate", "1K"),
        *("--corpus", str(text), "--nvme-path", str(folder / "swap"), "--config", str(everything_moves)),
        *("--json", str(folder / "figures.json"), "--plot", str(folder / "loss.png")),
    ]
    # The root is what an installation would put on the path; the suite also runs from a plain checkout.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "evaluation" in done.stderr and "100%" in done.stderr
    return Run(folder, json.loads((folder / "figures.json").read_text()), done.stdout)


@pytest.fixture(scope="module")
def on_nvme(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("nvme"), "nvme")


def test_a_run_on_nvme_moves_bytes_and_reports_every_figure(on_nvme: Run) -> None:
    figures = on_nvme.figures
    assert set(figures) == FIGURES
    assert len(figures["losses"]) == figures["steps"] == STEPS
    assert all(map(math.isfinite, [*figures["losses"], figures["validation_loss"]]))
    # Every update reads weights and states and writes both back. The last step's runs behind it: the evaluation asks
    # for the weights of nearly all of it.
    least_bytes = (STEPS - 1) * 12 * figures["parameters"]
    assert figures["nvme_read_bytes"] >= least_bytes
    assert figures["nvme_write_bytes"] >= least_bytes
    assert figures["nvme_written_bytes_per_step"] == figures["nvme_write_bytes"] / STEPS
    assert figures["nvme_written_bytes_per_day"] > figures["nvme_write_bytes"]
    assert figures["releases"] >= STEPS * figures["units"]
    assert figures["measured_nvme_bytes"] >= figures["planned_nvme_bytes"] > 0
    assert figures["bigram_entropy"] < figures["unigram_entropy"]


def test_the_table_shows_what_people_ask_for(on_nvme: Run) -> None:
    shown = ("NVMe planned", "exposed I/O wait", "prefetch hit rate", "drive wear", "peak RSS", "validation loss")
    for row in (*shown, "bigram"):
        assert row in on_nvme.printed


def test_a_run_leaves_no_file_on_the_disk(on_nvme: Run) -> None:
    assert not (on_nvme.folder / "swap").exists()


def test_the_loss_curve_is_a_picture(on_nvme: Run) -> None:
    pytest.importorskip("matplotlib")
    assert (on_nvme.folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.broad
@pytest.mark.parametrize("tier", ["cpu", "none"])
def test_the_tier_does_not_change_the_losses(on_nvme: Run, tmp_path: Path, tier: str) -> None:
    elsewhere = train(tmp_path, tier).figures
    assert elsewhere["nvme_read_bytes"] == elsewhere["nvme_write_bytes"] == 0
    assert elsewhere["losses"] == on_nvme.figures["losses"]
    assert elsewhere["validation_loss"] == on_nvme.figures["validation_loss"]


@pytest.mark.parametrize("numel", [10**6, 10**7, 5 * 10**7, 336 * 10**6, 10**9])
def test_the_shape_has_the_wanted_size(gpt: ModuleType, numel: int) -> None:
    assert gpt.shape_for(numel, 256).numel == pytest.approx(numel, rel=0.05)


def test_a_shape_counts_its_parameters(gpt: ModuleType) -> None:
    shape = gpt.Shape(layers=2, width=128, sequence=32)
    assert sum(parameter.numel() for parameter in gpt.GPT(shape).parameters()) == shape.numel


@pytest.mark.parametrize(("text", "value"), [("50M", 50_000_000), ("32K", 32_000), ("1.5B", 1_500_000_000), ("7", 7)])
def test_counts_are_read_with_their_unit(train_gpt: ModuleType, text: str, value: int) -> None:
    assert train_gpt.count(text) == value


def test_a_config_file_wins_key_by_key(train_gpt: ModuleType) -> None:
    ours = {"a": 1, "block": {"x": 1, "y": {"deep": 1, "kept": 2}}}
    theirs = {"block": {"y": {"deep": 3}, "z": 4}}
    assert train_gpt.merged(ours, theirs) == {"a": 1, "block": {"x": 1, "y": {"deep": 3, "kept": 2}, "z": 4}}


def test_the_clock_ends_a_run_in_time_for_the_evaluation(pace: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    options = SimpleNamespace(steps=None, seconds=100.0, evaluate=3000, batch=10, sequence=10)
    schedule = pace.Schedule(options, spent=20.0)
    while schedule.progress() < 1:
        now += 2.0
        schedule.done += 1
    evaluation_seconds = 2.0 * 3000 / 100 / 3
    assert 80 - 2 * 2.0 <= now + evaluation_seconds <= 80
    assert schedule.left() == 80 - now


def test_the_learning_rate_rises_and_falls_to_nothing(pace: ModuleType) -> None:
    schedule = pace.Schedule(SimpleNamespace(steps=100, seconds=None, evaluate=1, batch=1, sequence=1))
    rates = []
    for schedule.done in range(101):
        rates.append(schedule.rate())
    peak = rates.index(max(rates))
    assert 0 < rates[0] < 0.2
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == 0


class FakeEngine:
    """Each forward takes 10 s of a clock."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.now += 10.0
        return torch.tensor(2.0)

    def eval(self) -> None: ...

    def train(self) -> None: ...


@pytest.mark.parametrize(("seconds", "evaluated"), [(None, 400), (45.0, 320), (5.0, 80)])
def test_the_evaluation_ends_in_time_and_says_what_it_is_of(
    train_gpt: ModuleType,
    pace: ModuleType,
    corpus: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float | None,
    evaluated: int,
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: engine.now)
    text = corpus.as_tensor(bytes(1000))
    options = SimpleNamespace(steps=1, seconds=seconds, evaluate=400, batch=2, sequence=10)
    found = train_gpt.evaluate(engine, corpus.Corpus(text, text), pace.Schedule(options), options)
    assert found == (2.0, evaluated)
    printed, expected = capsys.readouterr().out, f"evaluated on {evaluated} of 400 bytes: there was no time for more"
    assert (expected in printed) == (evaluated < 400)


def settled(train_gpt: ModuleType, *words: str) -> tuple[str, int, int]:
    options = train_gpt.parse_arguments([*words])
    train_gpt.settle(options)
    return options.dtype, options.params, options.sequence


@pytest.fixture
def slow(train_gpt: ModuleType, pace: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A CPU on which bf16 is slow, a step of 50 M parameters takes 10 s and one of fewer less."""
    monkeypatch.setattr(train_gpt, "compute_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(train_gpt, "slow_bf16", lambda device: "bf16 is slow")
    monkeypatch.setattr(pace, "age_seconds", lambda: 10.0)
    monkeypatch.setattr(pace, "step_seconds", lambda shape, batch, dtype: shape.numel / 50e6 * batch / 4 * 10)
    return train_gpt


def test_a_slow_cpu_trains_in_fp32_and_fewer_parameters(slow: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    dtype, params, sequence = settled(slow)
    # 60.4 steps with the evaluation in 160 s: 2.6 s each
    assert dtype == "fp32" and sequence == 256 and 12e6 < params < 14e6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training in fp32: bf16 is slow") and "parameters in the place of 50M" in lines[1]
    assert len(lines) == 2


def test_what_the_command_line_says_stays(slow: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settled(slow, "--dtype", "bf16", "--params", "50M", "--sequence", "256") == ("bf16", 50_000_000, 256)
    assert settled(slow, "--dtype", "bf16", "--steps", "3") == ("bf16", 50_000_000, 256)
    theirs = tmp_path / "config.json"
    theirs.write_text(json.dumps({"bf16": {"enabled": True}}))
    assert settled(slow, "--config", str(theirs), "--steps", "3") == ("bf16", 50_000_000, 256)
    assert capsys.readouterr().out == ""
    _, params, sequence = settled(slow, "--params", "50M")
    assert params == 50_000_000 and 32 <= sequence < 100


def test_a_fast_cpu_trains_what_is_written(
    slow: ModuleType, pace: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow, "slow_bf16", lambda device: "")
    monkeypatch.setattr(pace, "step_seconds", lambda shape, batch, dtype: 1.5)
    assert settled(slow) == ("bf16", pace.PARAMS, pace.SEQUENCE)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (ConfigError("a:\n wrong"), 1, "train_gpt.py: a: wrong\n")],
)
def test_an_end_before_the_end_is_one_line(
    train_gpt: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    told: str,
) -> None:
    def run(options: Any) -> None:
        options.nvme_path.mkdir()
        raise error

    monkeypatch.setattr(train_gpt, "run", run)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--nvme-path", str(tmp_path / "swap")])
    assert train_gpt.main() == status
    assert capsys.readouterr().err == told and not (tmp_path / "swap").exists()


def test_the_pace_is_measured(pace: ModuleType, gpt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pace.step_seconds(gpt.Shape(2, 64, 32), 2, torch.float32) > 0
    monkeypatch.setattr(pace, "WIDTH_MAX", 64)
    assert pace.step_seconds(gpt.Shape(90, 64 * 200, 32), 2, torch.float32) > 0  # the layer alone is 8 GB
    assert pace.age_seconds() > 0
