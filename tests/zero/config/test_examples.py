"""Configurations that DeepSpeed, transformers, accelerate, LLaMA-Factory, axolotl and others show load and train."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.auto_values import read_facts, resolve_auto
from zero.config.fields import AUTO
from zero.config.known_keys import known_keys
from zero.tools import cli
from zero.tools.config_command import config_with_origins
from zero.tools.config_schema import json_schema

FOLDER = Path(__file__).resolve().parents[2] / "data" / "configs"
EXAMPLES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
}
WIDTH, SAMPLES, STEPS = 16, 32, 2


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows.to(self.layers[0].weight.dtype)).float().square().mean()


def samples() -> list[Tensor]:
    return list(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))


def on(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its swap files in a folder of the test's."""
    return json.loads(json.dumps(config).replace("/local_nvme", str(folder)))  # type: ignore[no-any-return]


def trained(config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of some steps."""
    optimizer = {} if "optimizer" in config else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, _, loader, _ = zero.initialize(model=Tiny(), config={**config, **optimizer}, training_data=samples())
    losses = []
    batches = iter(loader)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_documented_example_trains_as_without_offload_on_one_rank(name: str, nvme_path: Path) -> None:
    example = on(nvme_path, EXAMPLES[name])
    before = copy.deepcopy(example)
    losses, weights = trained(example)
    assert example == before
    plain_losses, plain = trained({**example, "zero_optimization": {"stage": 0}})
    assert losses == plain_losses
    assert all(torch.equal(weights[key], plain[key]) for key in plain)
    initial = dict(Tiny().named_parameters())
    assert all(torch.isfinite(value).all() for value in weights.values())
    moves = "scheduler" in example or any(not torch.equal(initial[key].to(plain[key]), plain[key]) for key in plain)
    assert moves


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_documented_example_is_shown_so_that_it_loads_to_the_same(
    name: str, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(EXAMPLES[name], world_size=world_size)
    assert cli.main(["config", "show", str(FOLDER / f"{name}.json"), "--world-size", str(world_size), "--json"]) == 0
    path = tmp_path / "shown.json"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    again = load_config(path, world_size=world_size)
    assert again.as_dict() == config.as_dict()
    assert set(again.inactive) == set(config.inactive)
    shown, once_more = json.loads(path.read_text(encoding="utf-8")), config_with_origins(again)
    assert shown.pop("_comment_origins").keys() == once_more.pop("_comment_origins").keys()
    assert once_more == shown


def test_what_is_resolved_is_shown_so_that_it_loads_to_the_same() -> None:
    config = load_config(EXAMPLES["llamafactory_z3_offload"])
    resolved = resolve_auto(config, read_facts(Tiny()))
    assert load_config(config_with_origins(resolved)).as_dict() == resolved.as_dict() != config.as_dict()


def test_a_default_that_was_shown_stays_a_default_and_an_edited_one_is_the_users() -> None:
    shown = config_with_origins(load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    again = load_config(shown)
    assert again.origin("aio.queue_depth") == "default" and again.inactive == ()
    assert again.origin("zero_optimization.stage") == "user"
    shown["aio"]["queue_depth"] = 8
    edited = load_config(shown)
    assert edited.aio.queue_depth == 8 and edited.origin("aio.queue_depth") == "user"


# ---- the schema --------------------------------------------------------------------------------

KINDS = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """What of JSON Schema our schema uses."""
    if "anyOf" in schema and not any(fits(value, form) for form in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if kind == "number" and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return False
    if kind in KINDS and not isinstance(value, KINDS[kind]):
        return False
    if kind == "number" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    return kind != "object" or all(member_fits(key, item, schema) for key, item in value.items())


def member_fits(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key in schema.get("properties", {}):
        return fits(value, schema["properties"][key])
    patterns = [form for pattern, form in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
    others = schema.get("additionalProperties", True)
    return any(fits(value, form) for form in patterns) or (others if isinstance(others, bool) else fits(value, others))


SCHEMA = json_schema(Config)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_schema_accepts_the_documented_examples(name: str) -> None:
    assert fits(EXAMPLES[name], SCHEMA)
    assert fits(config_with_origins(load_config(EXAMPLES[name])), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_clippng": 1},
        {"zero_optimization": {"stge": 3}},
        {"aio": 3},
        {"train_batch_size": [8]},
        {"bf16": {"enabled": "maybe"}},
        {"zero_optimization": {"offload_param": {"device": 3}}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(wrong: dict[str, Any]) -> None:
    assert not fits(wrong, SCHEMA)


FORMS = [
    True,
    0,
    1,
    3,
    -1,
    2.5,
    1e9,
    0.5,
    "x",
    "true",
    "FALSE",
    "1e9",
    "12GB",
    "fp32",
    "cpu",
    "inf",
    [],
    ["a"],
    [0.9, 0.99],
    {},
]


def everywhere(value: Any) -> dict[str, Any]:
    """A configuration that has the value at every key that is no block."""
    made: dict[str, Any] = {}
    for key in LEAVES:
        *above, name = key.path.split(".")
        at = made
        for part in above:
            at = at.setdefault(part, {})
        at[name] = value
    return made


def schema_at(path: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = SCHEMA
    for part in path.split("."):
        found = found["properties"][part] if "properties" in found else found["anyOf"][0]["properties"][part]
    return found


TYPES = ("optimizer.type", "scheduler.type")
"""A wrong one says nothing of what stands below it."""
SWITCHED = tuple(key.path.removesuffix("enabled") for key in known_keys(Config) if key.name == "enabled")
"""Blocks of which no value is looked at where they are switched off."""
LEAVES = [key for key in known_keys(Config) if key.inner is None and key.path not in TYPES]


@pytest.mark.parametrize("value", FORMS, ids=str)
def test_the_schema_accepts_at_every_key_what_the_loader_accepts_there(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:  # some key refuses whatever it is
        load_config(everywhere(value))
    refused = {line.strip().partition(": ")[0] for line in str(caught.value).splitlines()[1:]}
    is_off = str(value).lower() in ("0", "false")
    looked_at = [key.path for key in LEAVES if not (is_off and key.path.startswith(SWITCHED))]
    accepted = [path for path in looked_at if not any(path.startswith(above) for above in refused)]
    assert [path for path in accepted if not fits(value, schema_at(path))] == []


def test_the_schema_refuses_an_object_wherever_the_loader_does() -> None:
    value = {"a": 1}
    with pytest.raises(ConfigError) as caught:
        load_config(everywhere(value))
    refused = {line.strip().partition(": ")[0] for line in str(caught.value).splitlines()[1:]} & {
        k.path for k in LEAVES
    }
    assert len(refused) > 200
    assert sorted(path for path in refused if fits(value, schema_at(path))) == []


def test_the_schema_is_json_and_knows_auto_everywhere() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    for key, value in SCHEMA["properties"].items():
        assert fits(AUTO, value), key
