"""The table of all configuration keys, written from the models: what a key does, or why it does nothing."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator

from zero.config import features
from zero.config.fields import ConfigBlock, Deprecated, Key, Only, block_of, known_keys, short_json, words_in
from zero.config.schema import plain

HEAD = """# Every key of the configuration

Written by `zero config keys > docs/config-keys.md` from the models in `zero/config`; a test says whether it is current.
[How a configuration is read](config.md).

- **acts**: implemented.
- **inert**: accepted, and without effect here, for the reason given; those in use are listed once when training starts.
- **refused**: only the values named are accepted; any other would change the numbers or break a promise, and the error
  says so, with what to do instead.

"ours" marks a key that DeepSpeed does not have. A default of `null` is derived by the engine, or off.
"""


def key_table(config: type[ConfigBlock]) -> str:
    """The table in Markdown: a section for each block, a row for each key."""
    sections: dict[str, list[Key]] = {}
    for key in known_keys(config):
        sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    parts = [HEAD]
    for block, keys in sections.items():
        parts.append(f"## {f'`{block}`' if block else 'Top level'}\n")
        about = "" if not block else _about(keys[0].block)
        parts += [f"{about}\n"] if about else []
        parts += ["| key | role | default | meaning |", "|---|---|---|---|", *map(_row, keys), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def descriptions(block: type[ConfigBlock]) -> dict[str, str]:
    """Key -> the docstring below its declaration, as one line."""
    texts: dict[str, str] = {}
    for kind in reversed(block.__mro__):
        if issubclass(kind, ConfigBlock) and kind.__module__ not in (ConfigBlock.__module__, features.__name__):
            texts |= dict(_attribute_docstrings(kind))
    return texts


def _attribute_docstrings(kind: type[ConfigBlock]) -> Iterator[tuple[str, str]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for declared, after in itertools.pairwise(body):
        if not (isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield declared.target.id, " ".join(after.value.value.split())


def _about(block: type[ConfigBlock]) -> str:
    text = inspect.getdoc(block) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(": ")[2] if paragraph.startswith("`") else paragraph


def _row(key: Key) -> str:
    inner = block_of(key.field)
    name = key.path.rpartition(".")[2]
    aliases = [alias for alias, meant in key.block.aliases.items() if meant == name]
    spelt = " or ".join(f"`{spelling}`" for spelling in (name, *aliases))
    if inner is not None:
        return f"| {spelt} | block | | [below](#{_anchor(key.path)}) |"
    default = short_json(plain(key.field.default))
    unless = getattr(key.block, "unless", None)
    role = key.role if unless is None or unless.key == name else "refused"
    return f"| {spelt} | {role} | `{default}` | {_cell(_meaning(key, name))} |"


def _meaning(key: Key, name: str) -> str:
    parts = [descriptions(key.block).get(name, "")]
    parts += [
        f"one of {', '.join(f'`{json.dumps(word)}`' for word in words)}"
        for words in [words_in(key.field.annotation)]
        if words
    ]
    parts += [key.reason] if key.role == "inert" else []
    for mark in key.field.metadata:
        if isinstance(mark, Only):
            allowed = " or ".join(f"`{short_json(value)}`" for value in mark.allowed if value is not None)
            parts.append(f"only {allowed}: {mark.fix}" if allowed else f"never: {mark.fix}")
        if isinstance(mark, Deprecated):
            parts.append(f"deprecated: {mark.note}")
    return "; ".join(part.rstrip(".") for part in parts if part)


def _anchor(path: str) -> str:
    return path.replace(".", "").lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
