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
from zero.config.fields import ConfigBlock, Key, kinds_of, known_keys, words_in

INERT = [key for key in known_keys(Config) if key.role == "inert"]
VALUES: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [3, 1, 10**6],
    float: [0.75, 2.0, 0.0],
    str: ["fp16", "none"],
    tuple: [["z3"], ["z1"], []],
    dict: [{"enabled": True}, {}],
    Any: ["fp16", 2, True],
}
ROUNDS = 3


def refuses_all(block: type[ConfigBlock]) -> bool:
    """True for a block that is refused wherever it stands, so that its keys cannot be set."""
    unless = getattr(block, "unless", None)
    return unless is not None and unless.key is None


def switched_off(block: type[ConfigBlock]) -> dict[str, Any]:
    """What a block that is refused for its content needs to be accepted."""
    unless = getattr(block, "unless", None)
    return {unless.key: unless.value} if unless is not None and unless.key else {}


def plausible(key: Key) -> list[Any]:
    """Values of the key's kind: the words that it takes, or some that users write; its default comes last."""
    named: list[Any] = list(words_in(key.field.annotation))
    if (off := switched_off(key.block)) and (name := key.path.rpartition(".")[2]) in off:
        return [off[name]]
    values = named or [value for kind in kinds_of(key.field.annotation) for value in VALUES[kind]]
    return sorted(values, key=lambda value: value == key.field.default)


def put(config: dict[str, Any], path: str, value: Any, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    *above, name = path.split(".")
    block = config
    for part in above:
        block = block.setdefault(part, {})
    block.update(beside or {})
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
        for key in INERT:
            if not refuses_all(key.block):
                values = plausible(key)
                put(config, key.path, values[number % len(values)], switched_off(key.block))
        yield config


def run(config: dict[str, Any]) -> Any:
    engine, *_ = zero.initialize(model=build("gpt"), config=json.loads(json.dumps(config)))
    return engine, losses_of(engine, 0, 1, 2, 3)


def test_every_value_of_such_a_key_is_listed_as_without_effect() -> None:
    assert len(INERT) > 300
    for key in INERT:
        for value in plausible(key):
            config = put({}, key.path, value, switched_off(key.block))
            if refuses_all(key.block):
                with pytest.raises(ConfigError):
                    load_config(config)
            else:
                assert key.path in load_config(config).inactive


def test_no_key_without_effect_changes_a_loss_a_weight_or_a_moment(nvme_path: Path) -> None:
    engine, losses = run(base(nvme_path))
    settable = {key.path for key in INERT if not refuses_all(key.block)}
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
