"""`zero config`: what holds, the schema, the keys and the defaults."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zero.config import load_config
from zero.tools import cli


def test_show_says_where_each_value_comes_from_and_what_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    content = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "nebula": {"enabled": False},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    assert cli.main(["config", "show", str(path), "--world-size", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train_batch_size", "16", "user"] in lines and ["gradient_accumulation_steps", "2", "auto"] in lines
    assert not [line for line in lines if line[-1:] == ["default"]] and ["without", "effect", "here:"] in lines
    assert cli.main(["config", "show", str(path), "--world-size", "4", "--all"]) == 0
    notes = capsys.readouterr().out
    assert ["aio.queue_depth", "32", "default"] in [line.split() for line in notes.splitlines()]
    assert cli.main(["config", "show", str(path), "--world-size", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    origins = shown["_comment_origins"]
    assert shown["gradient_accumulation_steps"] == 2
    assert origins["train_batch_size"] == "user" and origins["gradient_accumulation_steps"] == "auto"
    assert origins["aio.queue_depth"] == "default" and origins["nebula.enabled"] == "user"
    assert "nebula.enabled (checkpoints " in notes
    assert "auto: gradient_accumulation_steps = 2 (from 16 samples = 2 x 2 x 4 ranks)" in notes


def test_show_reads_the_standard_input(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"train_batch_size": 3}'))
    assert cli.main(["config", "show", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["train_batch_size"] == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    assert cli.main(["config", "show", "-"]) == 1
    assert re.search("standard input: .*not valid JSON", capsys.readouterr().err)


def test_what_is_shown_loads_again_beside_elasticity_which_takes_no_batch_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
    (tmp_path / "ds.json").write_text(json.dumps({"elasticity": block}))
    assert cli.main(["config", "show", "--json", str(tmp_path / "ds.json")]) == 0
    again, first = load_config(json.loads(capsys.readouterr().out)), load_config({"elasticity": block})
    assert again.as_dict() == first.as_dict() and first.train_batch_size is not None
    assert cli.main(["config", "show", str(tmp_path / "ds.json"), "--all"]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["train_batch_size", str(first.train_batch_size)] in shown


def test_show_of_a_wrong_file_prints_every_problem_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clippng": 1, "zero_optimization": {"stage": 4}}', encoding="utf-8")
    assert cli.main(["config", "show", str(path)]) == 1
    printed, errors = capsys.readouterr()
    assert printed == "" and "2 problems" in errors and "'gradient_clipping'" in errors
    assert cli.main(["config", "show", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_the_defaults_are_printed_as_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "defaults"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert load_config(printed).as_dict() == load_config({"config_version": 1}).as_dict()


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False and "zero_optimization" in schema["properties"]
