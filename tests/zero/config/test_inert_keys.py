"""Every key that is accepted without effect changes no number, whatever its value; the keys are those of the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import losses_of, masters, same_bits, unequal
from models import ADAMW, build
from ranks import RankPool

import zero
from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.known_keys import known_keys

INERT = [key for key in known_keys(Config) if key.role == "inert"]
VALUES: list[Any] = [True, False, 3, 10**6, 0.75, "fp16", ["a"], {"enabled": True}]
ROUNDS = 3


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *above, name = path.split(".")
    block = config
    for part in above:
        block = block.setdefault(part, {})
    block[name] = value
    return config


def base(nvme_path: Path) -> dict[str, Any]:
    """What keys without effect could disturb: every stage of the path of a weight and of its gradient."""
    nvme = [{"device": "nvme", "nvme_path": str(nvme_path)} for _ in range(2)]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "zero_optimization": {"stage": 3, "offload_param": nvme[0], "offload_optimizer": nvme[1]},
        "activation_checkpointing": {"partition_activations": False},
        "checkpoint": {"tag_validation": "Ignore"},
    }


def settings(nvme_path: Path) -> Iterator[dict[str, Any]]:
    """Configurations in which all these keys stand, each with another of its values from round to round."""
    for number in range(ROUNDS):
        config = base(nvme_path)
        for at, key in enumerate(INERT):
            put(config, key.path, VALUES[(at + number) % len(VALUES)])
        yield config


def run(config: dict[str, Any]) -> Any:
    engine, *_ = zero.initialize(model=build("gpt"), config=json.loads(json.dumps(config)))
    return engine, losses_of(engine, 0, 1, 2, 3)


def test_every_value_of_such_a_key_is_listed_as_without_effect() -> None:
    assert len(INERT) > 300
    for key in INERT:
        for value in VALUES:
            assert load_config(put({}, key.path, value)).inactive == (key.path,)


def test_no_key_without_effect_changes_a_loss_a_weight_or_a_moment(nvme_path: Path) -> None:
    engine, losses = run(base(nvme_path))
    settable = {key.path for key in INERT}
    for config in settings(nvme_path):
        assert settable <= set(load_config(config).inactive)
        other, same = run(config)
        assert same == losses and unequal(other, engine) == []
        other.close()
    engine.close()


def run_of_ranks(configs: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Any]]]:
    """The losses and masters of each configuration."""
    found = []
    for config in configs:
        engine, losses = run(config)
        found.append((losses, masters(engine)))
        engine.close()
    return found


@pytest.mark.broad
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_key_without_effect_changes_what_ranks_exchange(
    stage: int, nvme_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    configs = [base(nvme_path), *settings(nvme_path)]
    for config in configs:
        config["zero_optimization"]["stage"] = stage
        config["zero_optimization"].update({"offload_param": {}} if stage < 3 else {})
    for results in rank_pool(2).run(run_of_ranks, configs):
        losses, values = results[0]
        for other_losses, other_values in results[1:]:
            assert other_losses == losses and same_bits(other_values.values(), values.values())


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    [
        ("compile.passes", ["autosp"], ["z1", "z3"]),
        ("compile.passes", ["z3", "autotp"], []),
        ("compile.passes", [["z3"]], ["z3"]),
        ("zero_optimization.load_from_fp32_weights", False, True),
        ("data_efficiency.data_sampling.curriculum_learning.enabled", True, False),
        ("data_efficiency.data_sampling.dynamic_batching.enabled", True, False),
        ("data_efficiency.data_routing.random_ltd.enabled", True, False),
    ],
    ids=str,
)
def test_a_value_that_would_change_what_deepspeed_computes_is_refused(path: str, value: Any, accepted: Any) -> None:
    with pytest.raises(ConfigError, match=path):
        load_config(put({}, path, value))
    load_config(put({}, path, accepted))
