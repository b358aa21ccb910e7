"""At the start an engine says one line, and one for keys without effect; `log_level` shows more or less."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens

import zero
from zero.assembly import precision_table
from zero.assembly.log import NOTICE, format_count

PROGRAM = """
import torch, zero
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
engine = zero.initialize(model=model, config={config!r})[0]
engine.backward(engine(torch.ones(1, 16)).sum())
engine.step()
engine.close()
"""
LINE = re.compile(r"zero: 676 parameters,.* host [\d.]+ \w+, device [\d.]+ KB, (scalar|avx2|avx512|torch)")
NOTE = "zero: these keys have no effect: zero_optimization.contiguous_gradients; `zero config show` says why"


def said(tmp_path: Path, *, ranks: int = 1, **more: Any) -> list[str]:
    """Lines of the standard error of a training with `more` in its config."""
    block = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {**block, "contiguous_gradients": True}, **more}
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(config=config))
    launcher = ["-m", "zero", "run", "--num_gpus", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr.splitlines()


@pytest.mark.broad
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_line_is_said_and_one_for_keys_without_effect(tmp_path: Path, ranks: int) -> None:
    note, line = said(tmp_path, ranks=ranks)
    assert note == NOTE and LINE.fullmatch(line)
    assert ("each of 2 ranks" in line) == (ranks == 2)


@pytest.mark.broad
def test_the_tables_come_at_level_info_and_nothing_above_warnings(tmp_path: Path) -> None:
    told = said(tmp_path, log_level="info")
    assert {"zero-infinity plan (this rank)", "what is kept in which dtype", NOTE} <= set(told)
    assert LINE.fullmatch(told[-1])
    assert said(tmp_path, log_level="Warning") == []


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tiers", [("none", "none"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_parameters_that_hold_inf_or_nan_are_named_once(
    open_engine: Any, nvme_path: Path, caplog: pytest.LogCaptureFixture, cut: bool, tiers: tuple[str, str], bad: float
) -> None:
    model: Any = build("gpt")
    with torch.no_grad():
        model.blocks[1].up.weight[-1, -1] = bad
        model.norm.bias[3] = bad
    model.norm.bias.requires_grad_(False)
    config = make_config(tiers, nvme_path)
    if cut:
        zero.Init(model, config_dict_or_path=config)
    engine = open_engine(model, config)
    engine(tokens(0))
    (line,) = [record.getMessage() for record in caplog.records if "inf or NaN" in record.getMessage()]
    assert line.startswith("2 parameters hold inf or NaN before the first step (blocks.1.up.weight, norm.bias)")


def test_where_all_values_are_finite_no_parameter_is_named(
    open_engine: Any, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    assert not [record for record in caplog.records if "inf or NaN" in record.getMessage()]


def test_a_level_holds_until_an_engine_comes_that_sets_none(open_engine: Any, nvme_path: Path) -> None:
    logger = logging.getLogger("zero")
    before = logger.level
    seen = []
    for level in ("info", "error", None):
        more = {} if level is None else {"log_level": level}
        open_engine(build("gpt"), make_config(("none", "none"), nvme_path, **more))
        seen.append(logger.level)
    assert seen == [logging.INFO, logging.ERROR, before]


def test_a_drive_that_is_not_needed_is_said_and_so_is_a_model_that_is_not_trained(
    open_engine: Any, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(NOTICE, "zero"):
        open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, memory_budget={"host": "1GB"}))
        open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
        without = make_config(("cpu", "none"), nvme_path)
        without.pop("optimizer")
        open_engine(build("gpt"), without)
    told = [text for text in caplog.messages if text.startswith("zero: ")]
    assert ["NVMe unused: host memory has room" in text for text in told] == [True, False, False]
    assert ["none of them trained" in text for text in told] == [False, False, True]


@pytest.mark.parametrize(
    ("count", "text"), [(676, "676"), (999_499, "999 K"), (999_500, "1 M"), (51_900_000, "51.9 M"), (8.03e9, "8.03 B")]
)
def test_counts_have_three_digits(count: float, text: str) -> None:
    assert format_count(int(count)) == text


@pytest.mark.parametrize(
    ("slowdown", "numel_min", "told"), [(12.3, 0, True), (1.9, 0, False), (12.3, 10_000_000, False)]
)
def test_a_cpu_that_is_slow_in_bf16_is_said_once_and_only_of_models_that_are_worth_a_measurement(
    open_engine: Any,
    nvme_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    slowdown: float,
    numel_min: int,
    told: bool,
) -> None:
    monkeypatch.setattr(precision_table, "bf16_slowdown", lambda device: slowdown)
    monkeypatch.setattr(precision_table, "WORTH_MEASURING_NUMEL", numel_min)
    monkeypatch.setattr(precision_table, "_warned_devices", [])
    wide = make_config(("cpu", "cpu"), nvme_path)
    wide.pop("bf16", None)
    for config in (wide, *2 * [make_config(("cpu", "cpu"), nvme_path, bf16={"enabled": True})]):
        open_engine(build("gpt"), config)
    lines = [text for text in caplog.messages if "no fast bf16 matmuls" in text]
    assert len(lines) == told and all("about 12 times as long as fp32" in line for line in lines)
