"""DeepSpeed's commands on PATH: each does ours of the same purpose, or says what to do instead."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aliased import ROOT, environment
from models import build, make_config

import zero
from zero.compat import commands, to_fp32
from zero.compat.deepspeed import ALIAS
from zero.compat.to_fp32 import main as zero_to_fp32

BIN = Path(ALIAS) / "bin"
NAMES = {*commands.COMMANDS, *commands.REFUSED}


def called(name: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell finds it."""
    path = os.pathsep.join([env.pop("first", str(BIN)), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [str(BIN / name), *words], env=environment(PATH=path, **env), capture_output=True, text=True, timeout=120
    )


def in_this_process(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{name}", *words])
    return commands.main()


def test_every_command_is_there_by_both_ways_and_no_other() -> None:
    assert {path.name for path in BIN.iterdir()} == NAMES | {"_interpreter.py"}
    assert all(os.access(BIN / name, os.X_OK) for name in NAMES)
    assert len({(BIN / name).read_text(encoding="utf-8") for name in NAMES}) == 1
    if not (ROOT / "compat" / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    text = (ROOT / "compat" / "pyproject.toml").read_text(encoding="utf-8")
    assert set(re.findall(r'^(\w+) = "zero\.compat\.commands:main"$', text, flags=re.M)) == NAMES


@pytest.mark.parametrize("name", commands.REFUSED)
def test_what_is_not_there_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, name, "--any", "words") == 2
    assert capsys.readouterr().err == f"{name}: not available in zero-infinity; {commands.REFUSED[name]}\n"


def test_a_command_is_found_by_a_shell() -> None:
    done = called("ds_bench", "--all-reduce")
    assert done.returncode == 2 and done.stderr.startswith("ds_bench: ") and "nccl-tests" in done.stderr


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    """A folder whose python3 has nothing installed."""
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    return str(tmp_path)


@pytest.mark.broad
def test_a_command_finds_the_interpreter_that_has_the_engine(foreign: str, tmp_path: Path) -> None:
    """The first python3 on PATH may be the system's: that of an environment which is not activated is found."""
    elsewhere = {"PATH": foreign}
    environments = [{"VIRTUAL_ENV": sys.prefix}]
    if Path(sys.prefix) == ROOT / ".venv":
        environments.append({})
    for more in environments:
        done = subprocess.run([str(BIN / "ds_bench")], env={**elsewhere, **more}, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("ds_bench: ") and "nccl-tests" in done.stderr
    alone = shutil.copytree(BIN, tmp_path / "a" / "b" / "c" / "bin")
    done = subprocess.run([str(alone / "ds_bench")], env=elsewhere, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ds_bench: expected a Python that has zero-infinity, got " in done.stderr and "activate" in done.stderr
    assert "Traceback" not in done.stderr and not (alone / "__pycache__").exists()


@pytest.mark.parametrize("name", ["ds_report", "dsr"])
def test_the_report_is_the_doctors(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, name, "--hide_operator_status") == 0
    assert "zero-infinity" in capsys.readouterr().out.partition("cpu")[0]


def test_zero_to_fp32_writes_the_pickled_file_that_is_named(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zero.initialize(model=build("gpt"), config=make_config(("none", "cpu"), nvme_path))[0] as engine:
        engine.save_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert zero_to_fp32([".", "pytorch_model.bin"]) == 0
    assert (tmp_path / "pytorch_model.bin").is_file()
    read = torch.load("pytorch_model.bin", weights_only=True)
    assert list(read) == list(build("gpt").state_dict()) and all(v.dtype == torch.float32 for v in read.values())
    assert zero_to_fp32([".", "plain"]) == 0 and zero_to_fp32([".", "safe", "--safe_serialization"]) == 0
    to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "function")
    to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "half", "float16")
    made = {name: os.listdir(tmp_path / name) for name in ("plain", "safe", "function", "half")}
    pickled = ["pytorch_model.bin"]
    assert made == {"plain": pickled, "safe": ["model.safetensors"], "function": pickled, "half": pickled}
    again = torch.load(tmp_path / "function" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(again[name], read[name]) for name in read)
