"""`zero.add_config_arguments`, and `initialize(args=...)` finding the configuration in what was parsed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import GPT, make_config
from probe import config_behind

import zero
from offload.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert zero.add_config_arguments(parser) is parser
    return parser.parse_args(words)


def test_a_script_can_be_called_as_with_deepspeed() -> None:
    options = parsed("--local_rank=3", "--deepspeed", "--deepspeed_config", "ds.json")
    assert options.deepspeed is True and options.deepspeed_config == "ds.json" and options.local_rank == 3
    assert vars(parsed()) == {
        "local_rank": -1,
        "zero_config": None,
        "deepspeed": False,
        "deepspeed_config": None,
        "deepscale": False,
        "deepscale_config": None,
    }


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(make_config(("none", "none"), tmp_path, clipping=0.25)))
    return str(path)


@pytest.mark.parametrize("name", ["zero_config", "deepspeed_config", "deepscale_config"])
def test_initialize_reads_what_args_name(name: str, config: str) -> None:
    with zero.initialize(args=parsed(f"--{name}", config), model=GPT())[0] as engine:
        assert config_behind(engine).gradient_clipping == 0.25
    given: Any = SimpleNamespace(**{name: config})  # scripts make such objects themselves
    zero.initialize(args=given, model=GPT())[0].close()


def test_config_wins_over_args(config: str, tmp_path: Path) -> None:
    other = make_config(("none", "none"), tmp_path, clipping=0.5)
    with zero.initialize(args=parsed("--zero_config", config), model=GPT(), config=other)[0] as engine:
        assert config_behind(engine).gradient_clipping == 0.5


def test_no_configuration_or_two_are_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="args with zero_config or deepspeed_config"):
        zero.initialize(args=parsed(), model=GPT())
    with pytest.raises(ConfigError, match=r"one configuration in args, got --zero_config .*--deepspeed_config other"):
        zero.initialize(args=parsed("--zero_config", config, "--deepspeed_config", "other.json"), model=GPT())
