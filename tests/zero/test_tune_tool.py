"""`zero tune --write`: what is written is the placement and the micro-batch that ran best, and it trains."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import zero
from zero.plan import machine
from zero.tools import cli, tune_command
from zero.tools.plan_command import build_model
from zero.tools.tune_search import Candidate, Trial, search

pytest.importorskip("transformers")
SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", **SHAPE}))
    return tmp_path


def arguments(folder: Path, nvme_path: Path, *more: str) -> list[str]:
    written = ["--model", str(folder / "model"), "--write", str(folder / "ds.json"), "--sequence", "16"]
    return ["tune", str(nvme_path), *written, *more]


SECONDS: dict[str, dict[int, float]] = {
    "none/none": {1: 4.0},
    "cpu/cpu": {1: 3.0, 2: 4.0, 4: 6.0, 8: 11.9},
}
"""8 samples take twice what 4 take, but for a hair."""


@pytest.mark.parametrize(("out_of", "kept"), [(None, 4), (4, 2), (2, 1)])
def test_the_best_placement_is_written_with_the_largest_micro_batch_that_pays(
    folder: Path, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, out_of: int | None, kept: int
) -> None:
    """Where a micro-batch is out of memory the one before it is kept."""
    ran: list[tuple[str, int]] = []

    def run(self: Any, candidate: Candidate, micro_batch: int) -> Trial:
        zero_block = candidate.content["zero_optimization"]
        name = f"{zero_block['offload_param']['device']}/{zero_block['offload_optimizer']['device']}"
        ran.append((name, micro_batch))
        if micro_batch == out_of:
            return Trial(micro_batch, failure="killed by signal 9")
        return Trial(micro_batch, SECONDS[name][micro_batch], 1000)

    monkeypatch.setattr(tune_command._TrialRunner, "__call__", run)
    assert cli.main(arguments(folder, nvme_path)) == 0
    written = json.loads((folder / "ds.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == kept
    assert written["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert ran[:2] == [("none/none", 1), ("cpu/cpu", 1)]


def test_what_is_written_keeps_the_base_and_trains(
    folder: Path, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for nothing but the drive; the trials run in this process."""
    base = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}, "gradient_accumulation_steps": 2}
    (folder / "base.json").write_text(json.dumps(base))
    tried: list[dict[str, Any]] = []

    def run(self: Any, candidate: Candidate, micro_batch: int) -> Trial:
        config = {**candidate.content, "train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
        tried.append(config)
        task = {"config": config, "model": str(folder / "model"), "model_args": "{}", "sequence": 16}
        return Trial(micro_batch, **tune_command.measure({**task, "steps": 1, "recompute": True}))

    monkeypatch.setattr(tune_command._TrialRunner, "__call__", run)
    monkeypatch.setattr(tune_command, "PLACEMENTS", (("nvme", "nvme"),))
    monkeypatch.setattr(tune_command, "search", functools.partial(search, most=1))
    assert cli.main(arguments(folder, nvme_path, "--base", str(folder / "base.json"))) == 0
    written = json.loads((folder / "ds.json").read_text())
    assert len(tried) == 1 and written["optimizer"] == base["optimizer"]
    assert written["gradient_accumulation_steps"] == 2 and written["memory_budget"] == {"host": "auto"}
    assert written["zero_optimization"]["offload_optimizer"]["nvme_path"] == [str(nvme_path)]
    engine = zero.initialize(model=build_model(str(folder / "model")), config=folder / "ds.json")[0]
    assert engine.train_micro_batch_size_per_gpu() == 1
    engine.close()


@pytest.mark.parametrize(("samples", "kept"), [(None, 8), (24, 8), (4, 4), (6, 2), (5, 1)])
def test_a_micro_batch_divides_the_samples_of_a_step(samples: int | None, kept: int) -> None:
    content = {} if samples is None else {"train_batch_size": samples}
    found = search([Candidate("", content)], lambda _, micro: Trial(micro, 1.0, 1), lambda *_: None, most=8)
    assert found is not None and found[0].micro_batch == kept


@pytest.mark.parametrize(("peak_bytes", "kept"), [(400, 2), (600, 1)])
def test_a_micro_batch_is_not_doubled_beyond_the_memory_of_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, peak_bytes: int, kept: int
) -> None:
    monkeypatch.setattr(machine, "cgroup_free_bytes", lambda: 1000)
    found = search([Candidate("", {})], lambda _, micro: Trial(micro, 1.0, peak_bytes * micro), lambda *_: None, most=8)
    assert found is not None and found[0].micro_batch == kept


def test_what_is_wrong_in_the_base_is_said(folder: Path, nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "base.json").write_text('{"gradient_clippng": 1}')
    assert cli.main(arguments(folder, nvme_path, "--base", str(folder / "base.json"))) == 1
    assert "the nearest known key is 'gradient_clipping'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "and --write FILE, the configuration to write; to measure the disk alone, run: zero doctor --probe"),
        (["--write", "new.json"], "expected --model, the model to run"),
        (["--model", "gpt"], "and --write FILE, the configuration to write"),
        (["--model", "gpt", "--write", "there.json"], "there.json already exists; remove it, or write another file"),
        (["--model", "gpt", "--write", "no/such.json"], "cannot write no/such.json: expected a file in an existing"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_runs(
    nvme_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("{}")
    monkeypatch.setattr(tune_command, "search", lambda *_, **__: pytest.fail("ran"))
    assert cli.main(["tune", str(nvme_path), *words]) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "there.json").read_text() == "{}"


@pytest.mark.slow
def test_trials_run_in_processes_of_their_own(folder: Path, nvme_path: Path) -> None:
    assert cli.main(arguments(folder, nvme_path, "--steps", "1")) == 0
    assert json.loads((folder / "ds.json").read_text())["train_micro_batch_size_per_gpu"] >= 1
