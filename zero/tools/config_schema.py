"""JSON Schema of the configuration: the keys, their roles, and every form in which a value may be written."""

from __future__ import annotations

from typing import Any

from zero.config.fields import AUTO, ConfigBlock, Only, block_of, kinds_of, means_auto, reason_of, role_of, words_in
from zero.config.loading import COMMENT_PREFIXES
from zero.config.schema import plain
from zero.tools.config_keys import descriptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(config: type[ConfigBlock]) -> dict[str, Any]:
    """A schema that accepts the same configurations as the loader, as far as a schema can: keys, types, words, bounds.

    Conditions on several keys (batch sizes, requirements of a stage) are only checked by the loader.
    """
    return {"$schema": DIALECT, "title": "zero-infinity configuration", **_block(config)}


def _block(block: type[ConfigBlock]) -> dict[str, Any]:
    declared = block.model_json_schema(mode="validation")["properties"]
    texts = descriptions(block)
    properties: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        inner = block_of(field)
        if inner is not None:
            forms: list[Any] = [_block(inner), {"const": AUTO}, {"type": "null"}]
            entry: dict[str, Any] = {"anyOf": [*forms, *([{"type": "boolean"}] if inner.shorthands else [])]}
        else:
            bounds = {key: declared[name][key] for key in ("minimum", "maximum") if key in declared[name]}
            entry = _leaf(kinds_of(field.annotation), bounds, words_in(field.annotation))
            if dict in kinds_of(field.annotation):
                entry["anyOf"] += [form for form in declared[name]["anyOf"] if form["type"] == "object"]
            entry["default"] = plain(field.default)
            if role_of(field) == "inert":
                entry["description"] = f"Accepted, without effect: {reason_of(field, block)}."
            elif texts.get(name):
                entry["description"] = texts[name]
            for mark in field.metadata:
                if isinstance(mark, Only):
                    entry["anyOf"] = _forms_of(mark.allowed)
                    entry["description"] = f"Restricted: {mark.fix}."
            if means_auto(field):
                entry["description"] = f'{entry.get("description", "")} "auto" has a meaning of its own.'.strip()
        for spelling in (name, *(alias for alias, meant in block.aliases.items() if meant == name)):
            properties[spelling] = entry
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^{prefix}": {} for prefix in COMMENT_PREFIXES},
        "additionalProperties": block.model_config.get("extra") != "forbid",
    }


def _forms_of(allowed: tuple[object, ...]) -> list[dict[str, Any]]:
    forms: list[dict[str, Any]] = [{"const": AUTO}, {"type": "null"}]
    for value in allowed:
        if isinstance(value, (bool, str)):
            forms.append({"type": "string", "pattern": f"^(?i:{value})$"})
        else:
            forms.append({"type": "string", "pattern": "[0-9]"})
        if not isinstance(value, str):
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
