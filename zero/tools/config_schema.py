"""JSON Schema of the configuration: the keys, their roles, and every form in which a value may be written."""

from __future__ import annotations

from typing import Any

from zero.config.fields import AUTO, Block, Only, block_of, means_auto, reason_of, role_of
from zero.config.loading import COMMENT_PREFIXES
from zero.config.schema import plain
from zero.tools.config_keys import descriptions, words_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(config: type[Block]) -> dict[str, Any]:
    """A schema that accepts what the loader reads, as far as a schema can say: keys, types, words and bounds.

    What depends on several keys (batch sizes, what a stage needs) only the loader checks.
    """
    return {"$schema": DIALECT, "title": "zero-infinity configuration", **_block(config)}


def _block(block: type[Block]) -> dict[str, Any]:
    declared = block.model_json_schema(mode="validation")
    told = descriptions(block)
    properties: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        inner = block_of(field)
        if inner is not None:
            forms: list[Any] = [_block(inner), {"const": AUTO}, {"type": "null"}]
            entry: dict[str, Any] = {"anyOf": [*forms, *([{"type": "boolean"}] if inner.shorthands else [])]}
        else:
            entry = _leaf(declared["properties"][name], declared.get("$defs", {}), words_of(field))
            entry["default"] = plain(field.default)
            if role_of(field) == "inert":
                entry["description"] = f"Accepted, without effect: {reason_of(field, block)}."
            elif told.get(name):
                entry["description"] = told[name]
            for mark in field.metadata:
                if isinstance(mark, Only):
                    entry["anyOf"] = _forms_of(mark.allowed)
                    entry["description"] = f"Restricted: {mark.fix}."
            if means_auto(field):
                entry["description"] = f'{entry.get("description", "")} "auto" has a meaning of its own.'.strip()
        for spelling in (name, *(other for other, meant in block.aliases.items() if meant == name)):
            properties[spelling] = entry
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^{prefix}": {} for prefix in COMMENT_PREFIXES},
        "additionalProperties": block.model_config.get("extra") != "forbid",
    }


def _forms_of(allowed: tuple[object, ...]) -> list[dict[str, Any]]:
    """What may be written where all other values are refused."""
    forms: list[dict[str, Any]] = [{"const": AUTO}, {"type": "null"}]
    for value in allowed:
        if isinstance(value, (bool, str)):
            forms.append({"type": "string", "pattern": f"^(?i:{value})$"})
        else:
            forms.append({"type": "string", "pattern": "[0-9]"})
        if not isinstance(value, str):
            forms += [{"const": value}, {"const": int(value)}] if isinstance(value, bool) else [{"const": value}]
    return forms


def _leaf(declared: dict[str, Any], definitions: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The declared type, and the other forms in which clients and people write it."""
    kinds = _kinds(declared, definitions)
    forms: list[dict[str, Any]] = [{"const": AUTO}, {"type": "null"}]
    if "boolean" in kinds:
        forms += [{"type": "boolean"}, {"enum": [0, 1]}, {"type": "string", "pattern": "^(?i:true|false)$"}]
    if kinds & {"integer", "number"}:
        number: dict[str, Any] = {key: declared[key] for key in ("minimum", "maximum") if key in declared}
        forms += [{"type": "number", **number}, {"type": "string", "pattern": "[0-9]|inf|Inf"}]
    if "string" in kinds:
        forms.append({"type": "string"} if not words else {"type": "string", "examples": words})
    if "array" in kinds:
        forms += [{"type": "array"}, {"type": "string"}]
    if "object" in kinds:
        forms.append({"type": "object"})
    return {"anyOf": forms} if kinds else {}


def _kinds(declared: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """The JSON types of a declaration; empty: any."""
    parts = [*declared.get("anyOf", ()), *declared.get("allOf", ())]
    if "$ref" in declared:
        parts.append(definitions[declared["$ref"].rpartition("/")[2]])
    kinds = {declared["type"]} if isinstance(declared.get("type"), str) else set()
    words = [*declared.get("enum", ()), *(declared[key] for key in ("const",) if key in declared)]
    kinds |= {type_of(value) for value in words}
    for part in parts:
        inner = _kinds(part, definitions)
        if not inner:
            return set()
        kinds |= inner
    return kinds


def type_of(value: object) -> str:
    """The name JSON Schema has for a value's type."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "array"
