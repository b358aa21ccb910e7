"""JSON Schema of the configuration: the keys, their roles, and every form in which a value may be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.config.fields import AUTO, AnyBlock, ConfigBlock, InactiveBlock, kinds_of, words_in
from zero.config.known_keys import Key, keys_of
from zero.config.loading import COMMENT_PREFIXES
from zero.config.scheduler_block import SchedulerParams
from zero.config.schema import plain
from zero.tools.config_keys import descriptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(config: type[ConfigBlock]) -> dict[str, Any]:
    """A schema that accepts the same configurations as the loader, as far as a schema can: keys, types, words, bounds.

    Conditions on several keys (batch sizes, requirements of a stage) are only checked by the loader.
    """
    return {"$schema": DIALECT, "title": "zero-infinity configuration", **_block(config)}


def _block(block: AnyBlock) -> dict[str, Any]:
    declared = {} if isinstance(block, InactiveBlock) else block.model_json_schema(mode="validation")["properties"]
    texts = descriptions(block)
    properties: dict[str, Any] = {}
    for name, key in keys_of(block).items():
        if key.inner is not None:
            forms: list[Any] = [_block(key.inner), {"const": AUTO}, {"type": "null"}]
            entry: dict[str, Any] = {"anyOf": [*forms, *([{"type": "boolean"}] if key.inner.shorthands else [])]}
        elif key.refused is not None:
            entry = {"anyOf": _forms_of(key.refused.allowed), "description": f"Restricted: {key.refused.fix}."}
        elif key.field is None:
            entry = {"description": f"Accepted, without effect: {key.reason}."}
        else:
            entry = _acting(key, declared[name], texts.get(name, ""))
        for spelling in (name, *(alias for alias, meant in block.aliases.items() if meant == name)):
            properties[spelling] = entry
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^{prefix}": {} for prefix in COMMENT_PREFIXES},
        "additionalProperties": block is SchedulerParams,
    }


def _acting(key: Key, declared: Mapping[str, Any], text: str) -> dict[str, Any]:
    annotation = None if key.field is None else key.field.annotation
    kinds = kinds_of(annotation)
    bounds = {name: declared[name] for name in ("minimum", "maximum") if name in declared}
    entry = _leaf(kinds, bounds, words_in(annotation))
    if dict in kinds:
        entry["anyOf"] += [form for form in declared["anyOf"] if form["type"] == "object"]
    entry["default"] = plain(key.default)
    text = f'{text} "auto" has a meaning of its own.'.strip() if key.means_auto else text
    return {**entry, "description": text} if text else entry


def _forms_of(allowed: tuple[object, ...]) -> list[dict[str, Any]]:
    forms: list[dict[str, Any]] = [{"const": AUTO}, {"type": "null"}]
    for value in allowed:
        if isinstance(value, str):
            forms += [{"type": "string", "examples": [value]}, {"type": "array"}]
        else:
            forms.append({"type": "string", "pattern": f"^(?i:{value})$" if isinstance(value, bool) else "[0-9]"})
            forms += [{"const": value}, {"const": int(value)}] if isinstance(value, bool) else [{"const": value}]
    return forms


def _leaf(kinds: set[Any], bounds: dict[str, Any], words: list[str]) -> dict[str, Any]:
    if Any in kinds:
        return {}
    forms: list[dict[str, Any]] = [{"const": AUTO}, {"type": "null"}]
    if bool in kinds:
        forms += [{"type": "boolean"}, {"enum": [0, 1]}, {"type": "string", "pattern": "^(?i:true|false)$"}]
    if kinds & {int, float}:
        forms += [{"type": "number", **bounds}, {"type": "string", "pattern": "[0-9]|inf|Inf"}]
    if str in kinds:
        forms.append({"type": "string"} if not words else {"type": "string", "examples": words})
    if tuple in kinds:
        forms += [{"type": "array"}, {"type": "string"}]
    return {"anyOf": forms}
