"""What an engine says while it runs: only what was asked for, and it changes no number."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import train, unequal
from models import ADAMW, BATCH, build, make_config, tokens
from probe import reports_progress, will_profile

from zero.engine import reports

Open = Callable[..., Any]
EVERYTHING: dict[str, Any] = {
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """`said(pattern)` -> the messages in which it is found."""
    caplog.set_level(logging.INFO, logger="zero")
    return lambda pattern: [text for text in caplog.messages if re.search(pattern, text)]


def test_saying_everything_changes_no_number(
    open_engine: Open, nvme_path: Path, tmp_path: Path, said: Callable[[str], list[str]]
) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    talking = make_config(("nvme", "nvme"), nvme_path, accumulation=2, csv_monitor=monitor, **EVERYTHING)
    silent = make_config(("nvme", "nvme"), nvme_path, accumulation=2)
    engines = [open_engine(build("gpt"), config) for config in (talking, silent)]
    for engine in engines:
        train(engine, *range(6))
    assert unequal(engines[0], engines[1]) == []
    assert len(said("^step=2, skipped")) == 1 and len(said("^flops profiler, step 2")) == 1


def test_nothing_is_said_or_kept_unasked(open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, steps_per_print=float("inf")))
    train(engine, 0, 1)
    assert not reports_progress(engine) and not will_profile(engine)
    assert not said("step=|time|flops|collectives") and engine.get_wall_clock_timers() == {}


def test_progress_is_said_every_so_many_steps_not_micro_steps(
    open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]
) -> None:
    config = make_config(("none", "none"), nvme_path, accumulation=2, steps_per_print=2)
    engine = open_engine(build("gpt"), config)
    train(engine, *range(10))
    lines = said("^step=")
    assert [line.partition(",")[0] for line in lines] == ["step=2", "step=4"]
    assert f"skipped=0, lr=[{ADAMW['lr']}], mom=[{tuple(ADAMW['betas'])}], samples/s=" in lines[0]
    engine.backward(engine(tokens(0)))
    engine.optimizer.step()
    assert len(said("^step=6")) == 1


def test_samples_that_a_checkpoint_has_counted_are_in_no_rate(
    open_engine: Open,
    nvme_path: Path,
    tmp_path: Path,
    said: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # a second each
    config = make_config(("none", "none"), nvme_path, steps_per_print=1)
    engine = open_engine(build("gpt"), config)
    train(engine, *range(5))
    engine.save_checkpoint(tmp_path)
    again = open_engine(build("gpt"), config)
    again.load_checkpoint(tmp_path)
    train(again, 5)
    assert again.global_samples == 6 * BATCH
    assert [line.partition("samples/s=")[2] for line in said("^step=")] == [f"{BATCH}"] * 6


def test_a_skipped_step_and_its_scale_are_said(
    open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]
) -> None:
    scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config = make_config(("none", "none"), nvme_path, bf16=False, fp16=scale, steps_per_print=1)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = open_engine(build("gpt").half(), {**config, "scheduler": schedule})
    for factor in (1.0, float("inf"), 1.0):
        engine.backward(engine(tokens(0)) * factor)
        engine.step()
    scales = [re.search(r"skipped=(\d).*loss_scale=(\d+)", line).groups() for line in said("^step=")]  # type: ignore[union-attr]
    assert scales == [("0", "256"), ("1", "128"), ("1", "128")]
    assert engine.global_steps == 3 and engine.lr_scheduler.last_batch_iteration == 1


def test_times_of_the_step_are_said_and_kept(
    open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]
) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, wall_clock_breakdown=True))
    train(engine, *range(3))
    assert len(said(r"^step=\d, time \(ms\) \| forward: [\d.]+ \| backward: [\d.]+ \| step: [\d.]+ \| wait: ")) == 3
    times, statistics = engine.get_wall_clock_timers(), engine.statistics()
    assert list(times) == ["forward", "backward", "step", "wait"] and engine.wall_clock_breakdown()
    assert 0 < times["forward"] < 1e3 * statistics.forward_seconds
    assert 0 < times["backward"] < 1e3 * statistics.backward_seconds


def test_memory_is_said_after_each_step(open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, memory_breakdown=True))
    train(engine, 0, 1)
    assert len(said(r"^step=\d, memory \| host pool: .* at most \| resident: .* \| .* at most")) == 2


def test_the_state_at_the_start_has_each_value_and_its_origin(
    open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]
) -> None:
    open_engine(build("gpt"), make_config(("none", "none"), nvme_path, dump_state=True, clipping=0.5))
    (text,) = said("^configuration in effect")
    assert "gradient_clipping = 0.5 (user)" in text and "prescale_gradients = false (default)" in text
    assert f"train_micro_batch_size_per_gpu = {BATCH} (user)" in text and "lr_scheduler: NoneType" in text


def test_the_summary_has_what_collectives_moved(
    open_engine: Open, nvme_path: Path, said: Callable[[str], list[str]]
) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path))
    train(engine, 0)
    assert engine.log_summary() == {} and said("^collectives after 1 steps:\n  none")
