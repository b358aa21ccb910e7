"""`config_version`: the defaults are those of the version, and do not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from zero.config import load_config, schema

FROZEN = Path(__file__).resolve().parents[2] / "data" / "configs" / "defaults"


def leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not left to the engine (None)."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, f"{prefix}{key}.")
        elif item is not None:
            yield prefix + key, item


@pytest.mark.parametrize("version", range(1, schema.VERSION + 1))
def test_the_defaults_of_a_version_never_change(version: int) -> None:
    """Who names a version counts on them. `zero config defaults` writes such a file."""
    frozen = dict(leaves(json.loads((FROZEN / f"{version}.json").read_text(encoding="utf-8"))))
    now = dict(leaves(load_config({"config_version": version}).as_dict()))
    assert len(frozen) > 40
    assert {key: now.get(key, "gone") for key in frozen} == frozen


def test_without_a_version_the_newest_defaults_hold() -> None:
    newest = load_config({})
    assert newest.config_version == schema.VERSION
    assert newest.as_dict() == load_config({"config_version": schema.VERSION}).as_dict()


@pytest.mark.parametrize("wrong", [0, schema.VERSION + 1, "two", 1.5, True])
def test_an_unknown_version_is_refused_with_those_known(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config_version: expected .*{schema.VERSION}, the versions this release"):
        load_config({"config_version": wrong})
