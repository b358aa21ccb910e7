"""Where a configuration may come from, and what happens to unknown keys that a client adds."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from offload.errors import ConfigError
from zero.config import Config, load_config, reading_as_deepspeed, sources, tolerating_unknown_keys
from zero.config.known_keys import keys_of, known_keys

CONTENT: dict[str, Any] = {
    "train_batch_size": 8,
    "steps_per_print": float("inf"),
    "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": 15099494.4},
}
CLIENTS: dict[str, Any] = {
    "train_batch_size": 8,
    "_comment": "not ours",
    "zero_optimization": {"stage": 3},
    "zero_optimization.reduce_bucket_size": 1024,
    "zero_optimization.stage3_prefetch_bucket_size": 921.6,
    "comms_config": {"comms_logger": {"enabled": False}},
    "monitor_config": {"tensorboard": {"enabled": False}},
    "gradient_clippng": 1.0,
    "client_version": "1.2",
}
"""What clients leave at the top level, and a slip of the user's."""
TOLERATED = {
    "zero_optimization.reduce_bucket_size": 'put "reduce_bucket_size" into the block "zero_optimization"',
    "zero_optimization.stage3_prefetch_bucket_size": (
        'put "stage3_prefetch_bucket_size" into the block "zero_optimization"'
    ),
    "gradient_clippng": "'gradient_clipping'",
    "client_version": "unknown key",
}


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("padding", ["=", ""])
def test_a_path_a_dict_and_base64_load_alike(encode: Any, padding: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONTENT), encoding="utf-8")
    text = encode(path.read_bytes()).decode().rstrip("=")
    encoded = text + padding * (-len(text) % 4)
    expected = load_config(CONTENT).as_dict()
    assert load_config(path).as_dict() == load_config(encoded).as_dict() == expected


def test_text_that_is_neither_a_path_nor_base64_of_an_object_is_a_missing_file() -> None:
    for text in ("ds_config.json", "bm8=", base64.b64encode(b"[1]").decode()):
        with pytest.raises(ConfigError, match="No such file"):
            load_config(text)


HJSON = """{
  # a comment
  train_batch_size: 8
  zero_optimization: {stage: 3, sub_group_size: 1e9}   // another
}
"""


def test_hjson_is_read_where_its_library_is(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HJSON, encoding="utf-8")
    if importlib.util.find_spec("hjson") is None:
        pytest.skip("hjson is not installed")
    config = load_config(path)
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 3)
    path.write_text("{\n  train_batch_size: 8\n  train_batch_size: 9\n}", encoding="utf-8")
    with pytest.raises(ConfigError, match="once in its block, got 2 times"):
        load_config(path)


def test_without_its_library_hjson_is_an_error_that_names_it(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HJSON, encoding="utf-8")
    monkeypatch.setattr(sources, "HJSON", "no_such_library_for_hjson")
    with pytest.raises(ConfigError, match=r"line 2, column 3: not valid JSON.*pip install hjson"):
        load_config(path)


def test_the_dict_handed_over_is_never_changed() -> None:
    for config in (CONTENT, CLIENTS):
        before = copy.deepcopy(config)
        load_config(config, unknown_top_level="warn")
        assert config == before


# ---- unknown keys at the top level -------------------------------------------------------------


def test_an_unknown_top_level_key_is_an_error_unless_it_is_to_be_tolerated() -> None:
    with pytest.raises(ConfigError, match="4 problems") as caught:
        load_config(CLIENTS)
    assert all(f"{key}: unknown key" in str(caught.value) for key in TOLERATED)
    config = load_config(CLIENTS, unknown_top_level="warn")
    lines = {line.partition(": ")[0]: line for line in config.ignored}
    assert set(lines) == set(TOLERATED)
    assert all(hint in lines[key] for key, hint in TOLERATED.items())
    known = {key: value for key, value in CLIENTS.items() if key not in TOLERATED}
    assert config.as_dict() == load_config(known).as_dict()


BLOCKS = {key.path: key.inner for key in known_keys(Config) if key.inner is not None}


@pytest.mark.parametrize("path", BLOCKS)
def test_an_unknown_key_in_a_block_is_a_warning_only_where_deepspeed_passes_over_it(path: str) -> None:
    block = BLOCKS[path]
    name = next(iter(keys_of(block)))
    slip = name + "q"
    config: dict[str, Any] = {slip: 1}
    for part in reversed(path.split(".")):
        config = {part: config}
    with pytest.raises(ConfigError, match=f"{path}.{slip}: unknown key; the nearest known key is '{name}'"):
        load_config(config)
    if not block.is_open:
        with reading_as_deepspeed(), pytest.raises(ConfigError, match=f"{path}.{slip}: unknown key"):
            load_config(config)
    else:
        with reading_as_deepspeed():
            (line,) = load_config(config).ignored
        assert line.startswith(f"{path}.{slip}: unknown key; the nearest known key is '{name}'")


def test_what_deepspeed_passes_over_and_what_it_refuses() -> None:
    """By the readers of its version 0.19: of dicts, and closed models."""
    is_open = {path for path, block in BLOCKS.items() if block.is_open and "." not in path}
    assert is_open >= {"flops_profiler", "activation_checkpointing", "aio", "elasticity", "autotuning", "checkpoint"}
    closed = {"zero_optimization", "fp16", "bf16", "hybrid_engine", "comms_logger", "tensorboard", "compile", "timers"}
    assert not is_open & closed
    with reading_as_deepspeed():
        (line,) = load_config({"flops_profiler": {"enabled": True, "step": 5}}).ignored
    assert line.startswith("flops_profiler.step: unknown key; ")


def test_tolerance_ends_with_its_block_and_is_not_seen_by_other_threads() -> None:
    failed: list[str] = []

    def load_elsewhere() -> None:
        try:
            load_config(CLIENTS)
        except ConfigError as error:
            failed.append(str(error))

    with tolerating_unknown_keys():
        config = load_config(CLIENTS)
        with pytest.raises(ConfigError):
            load_config(CLIENTS, unknown_top_level="error")
        thread = threading.Thread(target=load_elsewhere)
        thread.start()
        thread.join()
    assert failed
    with pytest.raises(ConfigError):
        load_config(CLIENTS)
    # A configuration that was read remembers what was tolerated.
    assert load_config(config, world_size=2).ignored == config.ignored


def test_deepspeeds_defaults_hold_where_it_is_asked_for_them_and_are_remembered() -> None:
    with reading_as_deepspeed():
        config = load_config({"client_key": 1})
        assert load_config({"gradient_clipping": 0}).gradient_clipping == 0.0
    assert config.gradient_clipping == 1.0 and config.origin("gradient_clipping") == "default"
    assert len(config.ignored) == 1
    assert load_config(config, world_size=2).gradient_clipping == 1.0
    assert load_config({}).gradient_clipping == 0.0


def test_initialize_warns_of_tolerated_keys_once(caplog: pytest.LogCaptureFixture) -> None:
    with tolerating_unknown_keys(), caplog.at_level(logging.WARNING, logger="zero"):
        engine, *_ = zero.initialize(model=torch.nn.Linear(4, 4), config={**CLIENTS, "optimizer": {"type": "AdamW"}})
        engine.destroy()
    warned = [
        record.getMessage() for record in caplog.records if "unknown keys that were ignored" in record.getMessage()
    ]
    assert len(warned) == 1
    assert all(f"{key}: " in warned[0] for key in TOLERATED)
