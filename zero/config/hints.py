"""Hints for unknown names: the name that was probably meant, and the block to which an unknown key belongs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable

from zero.config.fields import ConfigBlock, block_of, known_keys

# Keys that users may try, but that have another name here -> what to set instead.
RENAMED_KEYS = dict.fromkeys(
    ("activation_offload", "cpu_offload_activations", "offload_activations"),
    'unknown key; set activation_checkpointing.activation_device to "cpu" or "nvme", and for all that autograd saves '
    "activation_checkpointing.activation_offloading to true",
)
HOMES_SHOWN = 3
KEYS_SHOWN = 8


def explain_unknown_key(
    key: str, *, block: type[ConfigBlock], root: type[ConfigBlock], extra_keys: Collection[str] = ()
) -> str:
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
    parts = ["unknown key"]
    if nested := _nested_key(key, block):
        return f'unknown key; dots do not nest keys: put "{nested[-1]}" into the block "{".".join(nested[:-1])}"'
    names = [*extra_keys, *block.model_fields, *block.aliases]
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


def _nested_key(key: str, block: type[ConfigBlock]) -> list[str]:
    """The parts of a dotted key, if they lead to a known key; else empty."""
    parts = key.split(".")
    at: type[ConfigBlock] | None = block
    for part in parts:
        name = part if at is None else at.aliases.get(part, part)
        if at is None or name not in at.model_fields:
            return []
        at = block_of(at.model_fields[name])
    return parts if len(parts) > 1 else []


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
def _blocks_by_key(root: type[ConfigBlock]) -> dict[str, tuple[str, ...]]:
    homes: dict[str, tuple[str, ...]] = {}
    for known in known_keys(root):
        parent, _, name = known.path.rpartition(".")
        homes[name] = (*homes.get(name, ()), f"in {parent}" if parent else "at the top level")
    return homes
