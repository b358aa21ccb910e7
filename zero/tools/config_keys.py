"""The table of all configuration keys, written from the models: what a key does, or why it does nothing."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator

from zero.config.fields import AnyBlock, ConfigBlock, Deprecated, InactiveBlock, short_json, words_in
from zero.config.known_keys import Key, known_keys
from zero.config.schema import plain

HEAD = """# Every key of the configuration

Written by `zero config keys > docs/config-keys.md` from `zero/config`; a test says whether it is current.
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
        about = "" if not block else _about(keys[0].parent)
        parts += [f"{about}\n"] if about else []
        parts += ["| key | role | default | meaning |", "|---|---|---|---|", *map(_row, keys), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def descriptions(block: AnyBlock) -> dict[str, str]:
    """Key -> the docstring below its declaration, as one line."""
    texts: dict[str, str] = {}
    for kind in () if isinstance(block, InactiveBlock) else reversed(block.__mro__):
        if issubclass(kind, ConfigBlock) and kind is not ConfigBlock:
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


def _about(block: AnyBlock) -> str:
    text = block.about if isinstance(block, InactiveBlock) else inspect.getdoc(block) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(": ")[2] if paragraph.startswith("`") else paragraph


def _row(key: Key) -> str:
    aliases = [alias for alias, meant in key.parent.aliases.items() if meant == key.name]
    spelt = " or ".join(f"`{spelling}`" for spelling in (key.name, *aliases))
    if key.inner is not None:
        return f"| {spelt} | block | | [below](#{_anchor(key.path)}) |"
    return f"| {spelt} | {key.role} | `{short_json(plain(key.default))}` | {_cell(_meaning(key))} |"


def _meaning(key: Key) -> str:
    if key.refused is not None:
        allowed = " or ".join(f"`{short_json(value)}`" for value in key.refused.allowed)
        return f"only {allowed}: {key.refused.fix}" if allowed else f"never: {key.refused.fix}"
    if key.field is None:
        return key.reason
    parts = [descriptions(key.parent).get(key.name, "")]
    if words := words_in(key.field.annotation):
        parts.append(f"one of {', '.join(f'`{json.dumps(word)}`' for word in words)}")
    parts += [f"deprecated: {mark.note}" for mark in key.field.metadata if isinstance(mark, Deprecated)]
    return "; ".join(part.rstrip(".") for part in parts if part)


def _anchor(path: str) -> str:
    return path.replace(".", "").lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
