"""What was learnt while a configuration was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Origin = Literal["user", "default", "auto"]


@dataclass(frozen=True)
class Choice:
    """A value for a key that was "auto"."""

    value: Any
    source: str
    """What it follows from."""


@dataclass(frozen=True)
class Report:
    """What was learnt while a configuration was read; paths are dotted."""

    world_size: int = 1
    ranks_per_node: int | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    """A copy of the configuration as the user gave it."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Canonical path to "user" or "auto"; a path that is missing was not given."""
    inactive: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a path of `inactive` does nothing; a path that is missing is overruled by other keys."""
    deprecated: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Lines about unknown top-level keys that were tolerated."""
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    """Canonical path to what was chosen for it where it was "auto"."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Top-level keys and the defaults that held for them instead of ours."""


def plain(value: object) -> object:
    """The same of dicts, lists and single values only."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
