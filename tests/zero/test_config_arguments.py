"""`zero.add_config_arguments`, and `initialize(args=...)` finding the configuration in what was parsed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import train
from models import GPT, build, make_config
from probe import config_behind

import zero
from offload.errors import ConfigError
from zero.config import load_config
from zero.dist import world
from zero.engine.initialize import refuse_local_storage


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


class Mpu:
    """Megatron's object, of ranks that share nothing but weights."""

    def __init__(self, **sizes: int) -> None:
        for kind in ("tensor_model", "pipeline_model", "sequence", "data"):
            setattr(self, f"get_{kind}_parallel_world_size", partial(sizes.get, kind, 1))


def test_an_mpu_of_one_rank_of_each_kind_is_taken_and_another_is_refused_by_its_function(
    open_engine: Callable[..., Any], nvme_path: Path
) -> None:
    config = make_config(("cpu", "cpu"), nvme_path)
    train(open_engine(build("gpt"), config, mpu=Mpu()), 0)
    for kind in ("tensor_model", "pipeline_model", "sequence", "data"):
        with pytest.raises(ConfigError, match=rf"mpu: expected 1 from get_{kind}_parallel_world_size\(\),.* got 2"):
            zero.initialize(model=build("gpt"), config=config, mpu=Mpu(**{kind: 2}))


def test_storage_of_each_node_is_refused_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sets the key for `save_on_each_node`, on one node too."""
    config = load_config({"checkpoint": {"use_node_local_storage": True}})
    refuse_local_storage(config)
    monkeypatch.setattr(world, "ranks_per_node", lambda: 2)
    monkeypatch.setattr(world, "world_size", lambda: 4)
    with pytest.raises(ConfigError, match=r"use_node_local_storage: expected false for 4 ranks, 2 of them here"):
        refuse_local_storage(config)
