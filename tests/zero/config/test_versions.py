"""`config_version`: a default that changes does not change for who named the version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from offload.errors import ConfigError
from zero.config import load_config, schema
from zero.config.fields import ConfigBlock, Flag, Was, Whole, earlier_defaults

FROZEN = Path(__file__).resolve().parents[2] / "data" / "configs" / "defaults"


class Inner(ConfigBlock):
    kept: Whole = 7
    changed: Annotated[Whole, Was(1, 10), Was(3, 20)] = 30


class Outer(ConfigBlock):
    inner: Inner = Inner()
    optional: Inner | None = None
    flag: Annotated[Flag, Was(2, False)] = True


@pytest.mark.parametrize(
    ("version", "changed", "flag"), [(1, 10, False), (2, 20, False), (3, 20, True), (4, 30, True), (None, 30, True)]
)
def test_a_version_keeps_the_defaults_it_had(version: int | None, changed: int, flag: bool) -> None:
    context = {"config_version": version}
    for given in ({}, {"inner": {}}, {"inner": {"kept": 7}}, {"optional": {}}):
        outer = Outer.model_validate(given, context=context)
        assert (outer.inner.changed, outer.inner.kept, outer.flag) == (changed, 7, flag)
        assert outer.model_fields_set == set(given)
        assert "changed" not in outer.inner.model_fields_set
        assert outer.optional is None or outer.optional.changed == changed


def test_what_the_user_gives_goes_before_the_default_of_any_version() -> None:
    outer = Outer.model_validate({"inner": {"changed": 1}, "flag": True}, context={"config_version": 1})
    assert (outer.inner.changed, outer.flag) == (1, True)
    assert outer.inner.model_fields_set == {"changed"}


def leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not left to the engine (None)."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, f"{prefix}{key}.")
        elif item is not None:
            yield prefix + key, item


@pytest.mark.parametrize("version", range(1, schema.VERSION + 1))
def test_the_defaults_of_a_version_never_change(version: int) -> None:
    """A changed default needs a new version, and `Was` at the key; `zero config defaults` writes the new file."""
    frozen = dict(leaves(json.loads((FROZEN / f"{version}.json").read_text(encoding="utf-8"))))
    now = dict(leaves(load_config({"config_version": version}).as_dict()))
    assert len(frozen) > 50
    assert {key: now.get(key, "gone") for key in frozen} == frozen


def test_without_a_version_the_newest_defaults_hold() -> None:
    newest = load_config({})
    assert newest.config_version == schema.VERSION
    assert newest.as_dict() == load_config({"config_version": schema.VERSION}).as_dict()
    assert not earlier_defaults(schema.Config, schema.VERSION)


@pytest.mark.parametrize("wrong", [0, schema.VERSION + 1, "two", 1.5, True])
def test_an_unknown_version_is_refused_with_those_known(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config_version: expected .*{schema.VERSION}, the versions this release"):
        load_config({"config_version": wrong})
