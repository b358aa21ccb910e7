"""Every known key, whether it acts or not, and hints for unknown names: the name meant, and the block it belongs to."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from zero.config.fields import (
    AnyBlock,
    ConfigBlock,
    InactiveBlock,
    Inert,
    MeansAuto,
    Refused,
    default_of,
    parse_flag,
)

Role = Literal["acts", "inert", "refused"]


@dataclass(frozen=True)
class Key:
    """One known key."""

    path: str  # Canonical and dotted.
    role: Role
    parent: AnyBlock  # The block that has it.
    default: Any
    field: FieldInfo | None = None  # Of a key that acts.
    reason: str = ""  # Why an inert key changes nothing.
    refused: Refused | None = None
    inner: AnyBlock | None = None  # The block that is its value.

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def means_auto(self) -> bool:
        return self.field is not None and any(isinstance(marker, MeansAuto) for marker in self.field.metadata)


@functools.cache
def keys_of(block: AnyBlock, prefix: str = "") -> Mapping[str, Key]:
    """The keys of a block by name, in the order of declaration; `prefix`: its path with a dot at the end."""
    keys: dict[str, Key] = {}
    fields = {} if isinstance(block, InactiveBlock) else block.model_fields
    for name, field in fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        inner = next((part for part in parts if isinstance(part, type) and issubclass(part, ConfigBlock)), None)
        keys[name] = Key(prefix + name, "acts", block, field.default, field, inner=inner)
    for name, row in block.rows.items():
        known = functools.partial(Key, prefix + name, parent=block, default=default_of(row))
        if isinstance(row, InactiveBlock):
            keys[name] = known("acts", inner=row)
        elif isinstance(row, Refused):
            keys[name] = known("refused", refused=row)
        else:
            keys[name] = known("inert", reason=row.reason if isinstance(row, Inert) else row)
    return keys


@functools.cache
def known_keys(block: AnyBlock, prefix: str = "") -> tuple[Key, ...]:
    """Every key of a block and of its inner blocks, outer keys first."""
    keys = list(keys_of(block, prefix).values())
    for key in tuple(keys):
        keys += () if key.inner is None else known_keys(key.inner, f"{key.path}.")
    return tuple(keys)


def is_off(block: AnyBlock, raw: Mapping[Any, Any]) -> bool:
    """True if the block, as it was read, is switched off."""
    try:
        return "enabled" in keys_of(block) and not parse_flag(raw.get("enabled"))
    except ValueError:
        return False


# Keys that users may try, but that have another name here -> what to set instead.
RENAMED_KEYS = dict.fromkeys(
    ("activation_offload", "cpu_offload_activations", "offload_activations"),
    'unknown key; set activation_checkpointing.activation_device to "cpu" or "nvme", and for all that autograd saves '
    "activation_checkpointing.activation_offloading to true",
)
HOMES_SHOWN = 3
KEYS_SHOWN = 8


def explain_unknown_key(key: str, *, block: AnyBlock, root: AnyBlock, extra_keys: Collection[str] = ()) -> str:
    """Explain an unknown key.

    Returns "unknown key", the nearest known keys of that block, and the block to which the key belongs, if any.

    Args:
        key: the key as written.
        block: the block in which it was found.
        root: the whole configuration, searched for blocks that know the key.
        extra_keys: keys that the block accepts besides its declared ones.
    """
    if key in RENAMED_KEYS:
        return RENAMED_KEYS[key]
    *above, name = key.split(".")
    if above and len(keys_on_path([*above, name], block)) > len(above):
        return f'unknown key; dots do not nest keys: put "{name}" into the block "{".".join(above)}"'
    parts = ["unknown key"]
    names = [*extra_keys, *keys_of(block), *block.aliases]
    near = nearest(key, names)
    homes = _blocks_by_key(root).get(key, ())
    if near:
        parts.append("the nearest known key is " + " or ".join(map(repr, near)))
    if homes:
        others = "" if len(homes) <= HOMES_SHOWN else f" or {len(homes) - HOMES_SHOWN} other blocks"
        parts.append("it belongs " + ", ".join(homes[:HOMES_SHOWN]) + others)
    if not near and not homes:
        others = "" if len(names) <= KEYS_SHOWN else ", ..."
        parts.append("known keys here: " + ", ".join(names[:KEYS_SHOWN]) + others)
    return "; ".join(parts)


def keys_on_path(parts: Iterable[str], block: AnyBlock) -> list[Key]:
    """The key that each part of a path below a block means, up to the first part that is unknown."""
    keys: list[Key] = []
    at: AnyBlock | None = block
    for part in parts:
        name = part if at is None else at.aliases.get(part, part)
        prefix = f"{keys[-1].path}." if keys else ""
        if at is None or name not in keys_of(at, prefix):
            break
        keys.append(keys_of(at, prefix)[name])
        at = keys[-1].inner
    return keys


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names that differ by one slip, else the most similar one, if any is similar."""
    # difflib alone misses short keys: "rl" resembles "lr" by 0.5 only.
    known = list(names)
    close = [name for name in known if _one_slip(word.lower(), name.lower())]
    return close or difflib.get_close_matches(word.lower(), known, n=1)


def _one_slip(left: str, right: str) -> bool:
    """True if one letter was dropped, added or replaced, or two neighbours were swapped, or the words are equal."""
    if abs(len(left) - len(right)) > 1:
        return False
    head = _common_prefix_length(left, right)
    left, right = left[head:], right[head:]
    tail = _common_prefix_length(left[::-1], right[::-1])
    left, right = left[: len(left) - tail], right[: len(right) - tail]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])


def _common_prefix_length(left: str, right: str) -> int:
    shorter = min(len(left), len(right))
    return next((at for at in range(shorter) if left[at] != right[at]), shorter)


@functools.cache
def _blocks_by_key(root: AnyBlock) -> dict[str, tuple[str, ...]]:
    homes: dict[str, tuple[str, ...]] = {}
    for known in known_keys(root):
        parent, _, name = known.path.rpartition(".")
        homes[name] = (*homes.get(name, ()), f"in {parent}" if parent else "at the top level")
    return homes
