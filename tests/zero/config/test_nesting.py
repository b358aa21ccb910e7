"""Configurations that nest without end, or contain themselves: one error of ours at every entry, which says where."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from offload.errors import ConfigError
from zero.compat import elasticity
from zero.compat.configs import DeepSpeedConfig
from zero.config import load_config
from zero.config.known_keys import known_keys
from zero.config.schema import Config
from zero.config.sources import DEPTH_MAX
from zero.tools import cli

SAYS = f"expected at most {DEPTH_MAX} levels of objects and lists, got more"
DEPTHS = (DEPTH_MAX + 1, 340, 990, 2900)


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind == "object" else [value]
    return value


def text_of(depth: int, kind: str) -> str:
    """Its JSON, which `json.dumps` could not write."""
    opening, closing = ('{"a":', "}") if kind == "object" else ("[", "]")
    return opening * depth + "1" + closing * depth


def cyclic() -> dict[str, Any]:
    config: dict[str, Any] = {"optimizer": {"type": "AdamW"}}
    config["zero_optimization"] = {"stage": 0, "x": config}
    return config


def cyclic_list() -> dict[str, Any]:
    betas: list[Any] = [0.9]
    betas.append(betas)
    return {"optimizer": {"type": "AdamW", "params": {"betas": betas}}}


def init(config: Any) -> None:
    with zero.Init(config_dict_or_path=config):
        pass


OBJECTS: dict[str, Callable[[], Any]] = {"cyclic": cyclic, "cyclic list": cyclic_list} | {
    f"{kind} {depth}": lambda depth=depth, kind=kind: {"datastates_ckpt": nested(depth, kind), "_comment": 1}
    for depth in DEPTHS
    for kind in ("object", "list")
}
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "load_config": load_config,
    "Init": init,
    "initialize": lambda config: zero.initialize(model=nn.Linear(2, 2), config=config),
    "initialize args": lambda config: zero.initialize(
        model=nn.Linear(2, 2), args=type("Args", (), {"deepspeed_config": config})
    ),
    "init_inference": lambda config: zero.init_inference(nn.Linear(2, 2), config),
    "init_inference keyword": lambda config: zero.init_inference(nn.Linear(2, 2), zero=config),
    "checkpointing.configure": lambda config: zero.checkpointing.configure(None, config),
    "DeepSpeedConfig": DeepSpeedConfig,
    "OffloadOptimizer": lambda config: zero.OffloadOptimizer(
        nn.Linear(2, 2).parameters(), torch.optim.AdamW, lr=0.1, offload={"device": "cpu", "aio": {"x": config}}
    ),
    "elasticity": lambda config: elasticity.compute_elastic_config(
        {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "x": config}}
    ),
}


def test_no_key_is_as_deep_as_the_limit() -> None:
    assert max(key.path.count(".") for key in known_keys(Config)) < DEPTH_MAX // 10


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_object_that_nests_without_end_is_refused_at_every_entry(entry: str) -> None:
    for made in OBJECTS.values():
        with pytest.raises(ConfigError, match=SAYS) as caught:
            ENTRIES[entry](made())
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["object", "list"])
def test_a_file_that_nests_without_end_is_refused_by_every_reader(
    depth: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = text_of(depth, kind)
    text = f'{{"datastates_ckpt": {inner}, "elasticity": {{"enabled": true, "micro_batch_sizes": {inner}}}}}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    for source in (str(path), base64.b64encode(text.encode()).decode()):
        for name in ("load_config", "Init", "initialize", "init_inference", "DeepSpeedConfig"):
            with pytest.raises(ConfigError, match=SAYS):
                ENTRIES[name](source)
    (tmp_path / "config.json").write_text(text)
    commands: list[list[str]] = [
        ["config", "show", str(path)],
        ["config", "show", "-"],
        ["plan", "torch.nn:Identity", str(path)],
        ["plan", "torch.nn:Linear", "--model-args", text],
        ["plan", str(tmp_path)],
        ["run", "--autotuning", "tune", str(tmp_path / "train.py"), "--deepspeed_config", str(path)],
    ]
    for words in commands:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert cli.main(words) == 1
        assert "Traceback" not in (said := capsys.readouterr().err) and SAYS in said, words
    monkeypatch.setenv(elasticity.SCHEDULER_VARIABLE, text)
    with pytest.raises(ConfigError, match=SAYS):
        elasticity.ensure_immutable_elastic_config({"max_train_batch_size": 8, "micro_batch_sizes": [2]})


def test_what_is_as_deep_as_the_limit_is_read_and_shown() -> None:
    config = load_config({"datastates_ckpt": nested(DEPTH_MAX - 2, "object")})
    assert json.loads(json.dumps(config.as_dict()))["datastates_ckpt"]
