"""Where the numbers of a run go: each monitor gets the same values, at the samples used by then, from one rank."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import losses_of, train
from models import ADAMW, BATCH, build, make_config, tokens

from offload.errors import ConfigError
from zero.assembly.monitors import Monitors
from zero.config import load_config

Open = Callable[..., Any]
TAGS = {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm"}


class Recorded(list[tuple[str, float, int]]):
    """(tag, value, samples) as some library was told."""


def rows_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    with (folder / f"{tag.replace('/', '_')}.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", tag.rpartition("/")[2]]
    return [(int(samples), float(value)) for samples, value in rows]


def csv_config(nvme_path: Path, folder: Path, **more: Any) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return make_config(("nvme", "nvme"), nvme_path, csv_monitor=monitor, **more)


def test_each_step_has_its_loss_rate_and_norm_at_the_samples_used(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = open_engine(build("gpt"), csv_config(nvme_path, tmp_path, accumulation=2, scheduler=schedule))
    losses, norms = [], []
    for step in range(3):
        losses.append(sum(losses_of(engine, 2 * step, 2 * step + 1)) / 2)
        norms.append(engine.get_global_grad_norm())
    samples = [2 * BATCH * step for step in (1, 2, 3)]
    folder = tmp_path / "job"
    assert {path.stem for path in folder.iterdir()} == {tag.replace("/", "_") for tag in TAGS}
    assert rows_of(folder, "Train/Samples/train_loss") == [
        (at, pytest.approx(loss, rel=1e-6)) for at, loss in zip(samples, losses, strict=True)
    ]
    # As in DeepSpeed: the rate after the step, which the next one uses.
    rates = [ADAMW["lr"] * iteration / 4 for iteration in range(3)]
    assert rows_of(folder, "Train/Samples/lr") == list(zip(samples, rates, strict=True))
    assert rows_of(folder, "Train/Samples/grad_norm") == list(zip(samples, norms, strict=True))


def test_a_client_that_divides_the_loss_itself_gets_the_same_curve(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def curve(name: str, divides: bool) -> list[tuple[int, float]]:
        engine = open_engine(build("gpt"), csv_config(nvme_path, tmp_path / name, accumulation=2))
        for index in range(4):
            loss = engine(tokens(index))
            engine.backward(loss / 2 if divides else loss, scale_wrt_gas=not divides)
            engine.step()
        return rows_of(tmp_path / name / "job", "Train/Samples/train_loss")

    assert curve("client", True) == curve("engine", False)


def test_a_loss_whose_gradients_are_forgotten_is_in_no_curve(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine = open_engine(build("gpt"), csv_config(nvme_path, tmp_path))
    engine.backward(engine(tokens(9)) * 100)
    engine.zero_grad()
    (loss,) = losses_of(engine, 0)
    assert rows_of(tmp_path / "job", "Train/Samples/train_loss") == [(BATCH, pytest.approx(loss, rel=1e-6))]


def test_a_file_that_is_there_is_gone_on_with(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    for _ in range(2):
        train(open_engine(build("gpt"), csv_config(nvme_path, tmp_path)), 0, 1)
    samples = [at for at, _ in rows_of(tmp_path / "job", "Train/Samples/lr")]
    assert samples == [BATCH, 2 * BATCH] * 2


def test_the_loss_scale_is_written_with_fp16(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    config = csv_config(nvme_path, tmp_path, bf16=False, fp16={"enabled": True, "initial_scale_power": 8})
    engine = open_engine(build("gpt").half(), config)
    train(engine, 0, 1)
    assert rows_of(tmp_path / "job", "Train/Samples/loss_scale") == [(BATCH, 256.0), (2 * BATCH, 256.0)]


def test_a_rank_that_does_not_write_makes_no_files(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitors = Monitors(load_config({"csv_monitor": block}), writes=False)
    monitors.write_events([("Train/Samples/lr", 1.0, 1)])
    assert monitors.enabled and not list(tmp_path.iterdir())


def test_what_is_off_is_not_opened(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    block = {"enabled": False, "output_path": str(tmp_path / "out")}
    config = make_config(("none", "none"), nvme_path, csv_monitor=block, wandb={"enabled": False})
    engine = open_engine(build("gpt"), config)
    train(engine, 0)
    assert not engine.monitor.enabled and not (tmp_path / "out").exists()


# ---- libraries that may be missing -------------------------------------------------------------

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_monitor_without_its_package_is_an_error_that_names_it_and_leaves_the_model(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = importlib.util.find_spec
    missing = PACKAGES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == missing else found(n, *rest))
    model = build("gpt")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=rf"{name}\.enabled: the package {missing} is not installed; pip install"):
        open_engine(model, make_config(("nvme", "nvme"), nvme_path, **{name: {"enabled": True}}))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not list(nvme_path.iterdir())


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    """Stand-ins with the calls of the libraries that are used; what they were told, by block."""
    told = {name: Recorded() for name in PACKAGES}
    started: dict[str, Any] = {}

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            started["tensorboard"] = log_dir

        def add_scalar(self, tag: str, value: float, samples: int) -> None:
            told["tensorboard"].append((tag, value, samples))

        def flush(self) -> None: ...
        def close(self) -> None: ...

    wandb = SimpleNamespace(run=None, init=lambda **given: started.update(wandb=given))
    wandb.log = lambda data, step: told["wandb"].extend((tag, value, step) for tag, value in data.items())
    experiment = SimpleNamespace(
        set_name=lambda name: started.update(comet_name=name),
        log_metric=lambda tag, value, step: told["comet"].append((tag, value, step)),
        flush=lambda: None,
    )
    comet = SimpleNamespace(start=lambda **given: started.update(comet=given) or experiment)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *rest: object() if n in PACKAGES.values() else found(n, *rest)
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    told["started"] = started  # type: ignore[assignment]
    return told


def test_every_library_is_told_the_same_as_the_files(
    open_engine: Open, nvme_path: Path, tmp_path: Path, libraries: dict[str, Any]
) -> None:
    config = csv_config(nvme_path, tmp_path)
    config["tensorboard"] = {"enabled": True, "output_path": "out", "job_name": "mine"}
    config["wandb"] = {"enabled": True, "project": "p", "group": "g", "team": "t"}
    config["comet"] = {"enabled": True, "samples_log_interval": 2 * BATCH, "experiment_name": "e", "project": "p"}
    engine = open_engine(build("gpt"), config)
    train(engine, *range(4))
    written = [(tag, value, at) for tag in TAGS for at, value in rows_of(tmp_path / "job", tag)]
    assert sorted(libraries["tensorboard"]) == sorted(libraries["wandb"]) == sorted(written)
    sparse = [event for event in written if event[2] in (BATCH, 3 * BATCH)]
    assert sorted(libraries["comet"]) == sorted(sparse)
    started = libraries["started"]
    assert started["tensorboard"] == "out/mine"
    assert started["wandb"] == {"project": "p", "group": "g", "entity": "t"}
    assert started["comet"]["project"] == "p" and started["comet_name"] == "e"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = csv_config(nvme_path, tmp_path)
    config["tensorboard"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}
    train(open_engine(build("gpt"), config), 0, 1)
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for tag in TAGS:
        seen = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in board.Scalars(tag)]
        assert rows_of(tmp_path / "job", tag) == seen
