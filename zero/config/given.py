"""The configuration as it was given, for who reads it from an engine: with numbers where it said "auto"."""

from __future__ import annotations

from typing import Any

from zero.config.fields import AUTO, Block, block_of
from zero.config.reading import copied
from zero.config.report import plain
from zero.config.schema import Config

ZERO = "zero_optimization"


def given_config(config: Config) -> dict[str, Any]:
    """A plain dict of its own: the user's keys as the user wrote them, with three exceptions.

    "auto" gives way to the value in effect, unless the engine has yet to derive it; the block `zero_optimization` is
    there and has its `stage`, as a number: clients ask `config["zero_optimization"]["stage"] == 3`, whatever the user
    left out.
    """
    given = _filled(copied(config.source), Config, config)
    block = given.get(ZERO)
    given[ZERO] = {**(block if isinstance(block, dict) else {}), "stage": config.zero_optimization.stage}
    return given


def _filled(raw: dict[str, Any], kind: type[Block], effective: Any) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in raw.items():
        name = kind.aliases.get(key, key)
        known = kind.model_fields.get(name) if isinstance(key, str) else None
        holds = getattr(effective, name, None) if known is not None else None
        inner = block_of(known) if known is not None else None
        if isinstance(value, str) and value == AUTO and holds is not None:
            filled[key] = plain(holds.model_dump() if isinstance(holds, Block) else holds)
        elif inner is not None and isinstance(value, dict):
            filled[key] = _filled(value, inner, holds)
        else:
            filled[key] = value
    return filled
