"""Write what the alias knows of DeepSpeed's names: `deepspeed_surface.py SOURCE...`, each a folder with its package.

The first source that has a name has its say: give the newest release first, then those with what it has lost.

Module paths, public classes with their bases, functions, constants that are plain values, and what packages re-export
go to `zero/compat/alias/deepspeed/surface.json`, one module a line. What the objects of `OBJECTS` have, which scripts
hold and ask, goes to `tests/data/deepspeed_objects.json`. Nothing of it is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "zero/compat/alias/deepspeed/surface.json"
OBJECTS_OUT = OUT.parents[4] / "tests/data/deepspeed_objects.json"
OBJECTS = [
    "runtime.config.DeepSpeedConfig",
    "runtime.engine.DeepSpeedEngine",
    "runtime.pipe.topology.ProcessTopology",
    "runtime.utils.PartitionedTensor",
    "runtime.zero.config.DeepSpeedZeroConfig",
    "utils.timer.SynchronizedWallClockTimer",
    "utils.timer.ThroughputTimer",
]
CONSTRUCTORS = {"dict": dict, "frozenset": frozenset, "list": list, "set": set, "str": str, "tuple": tuple}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those at the top level of a module, also under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from statements([*node.body, *(one for handler in node.handlers for one in handler.body)])


def constants(tree: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """Names in capitals whose value is plain data, and can be computed from such."""
    known: dict[str, Any] = {}
    for node in statements(tree.body):
        if isinstance(node, ast.ClassDef) and not node.bases:
            known[node.name] = SimpleNamespace(**constants(node))  # such as a class that only names values
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        try:
            value = eval(compile(ast.Expression(node.value), "", "eval"), {"__builtins__": CONSTRUCTORS}, dict(known))
        except Exception:  # it is computed from something else
            continue
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
        known.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    shown = {name: plain(value) for name, value in known.items() if name.isupper() and not name.startswith("_")}
    return {name: value for name, value in shown.items() if value not in (NotImplemented, {})}  # {}: filled later


def plain(value: Any) -> Any:
    """The value if JSON gives it back as it is, else NotImplemented."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return NotImplemented
    return value if same else NotImplemented


def exports(tree: ast.Module, package: str) -> dict[str, str]:
    """What a package takes from its own modules: module below `deepspeed` -> names, or *."""
    found: dict[str, list[str]] = {}
    for node in statements(tree.body):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = package.split(".") if package else []
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        home = ".".join(part for part in (base, node.module or "") if part)
        if not node.level and not home.startswith("deepspeed"):
            continue
        names = [name if (name := one.asname or one.name) == one.name else f"{name}={one.name}" for one in node.names]
        home = home.removeprefix("deepspeed").removeprefix(".")
        found.setdefault(home, []).extend(name for name in names if not name.startswith("_"))
    return {home: " ".join(names) for home, names in found.items() if names}


def described(file: Path, package: str | None) -> dict[str, Any]:
    """A module's entry; `package` is its own name when it is one."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(statements(tree.body))
    classes = {
        node.name: base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for base in [node.bases[0] if node.bases else ast.Name("object")]
    }
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    entry = {
        "package": package is not None,
        "classes": {name: base for name, base in classes.items() if not name.startswith("_")},
        "functions": " ".join(sorted(functions)),
        "values": constants(tree),
        "from": exports(tree, package) if package is not None else {},
    }
    return {key: value for key, value in entry.items() if value}


def public_names(body: ast.ClassDef) -> dict[str, dict[str, str]]:
    """What an object of a class has: methods with the names of their parameters, and attributes that it sets."""
    methods: dict[str, str] = {}
    stored: set[str] = set()
    for node in body.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        stored |= {name.attr for name in stores if ast.unparse(name.value) == "self"}
        if any(ast.unparse(mark).endswith(("property", ".setter")) for mark in node.decorator_list):
            stored.add(node.name)
        elif not node.name.startswith("_"):
            names = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            methods[node.name] = " ".join(name for name in names if name not in ("self", "cls"))
    fields = (node.target for node in body.body if isinstance(node, ast.AnnAssign) and node.value is not None)
    stored |= {target.id for target in fields if isinstance(target, ast.Name)}
    shown = sorted(name for name in stored - {*methods} if not name.startswith("_"))
    return {"methods": dict(sorted(methods.items())), "attributes": dict.fromkeys(shown, "")}


def objects_of(source: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Class of `OBJECTS` -> its public names."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for path in OBJECTS:
        home, _, name = path.rpartition(".")
        tree = ast.parse((source / "deepspeed" / f"{home.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found[path] = public_names(node)
    return found


def modules_of(source: Path) -> dict[str, Any]:
    """Module below `deepspeed` -> its entry."""
    table = {}
    for file in sorted((source / "deepspeed").rglob("*.py")):
        parts = file.relative_to(source / "deepspeed").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not parts[-1].startswith("test") and parts[-1] != "__main__":
            table[name] = described(file, name if parts[-1] == "__init__" else None)
    return table


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both entries; where they differ, the first."""
    both = {key: second.get(key, {}) | first.get(key, {}) for key in ("classes", "values")}
    names = dict.fromkeys(f"{first.get('functions', '')} {second.get('functions', '')}".split())
    homes = {**second.get("from", {}), **first.get("from", {})}
    for home, words in second.get("from", {}).items():
        homes[home] = " ".join(dict.fromkeys(f"{homes[home]} {words}".split()))
    package = first.get("package", False) or second.get("package", False)
    entry = {**both, "functions": " ".join(names), "from": homes, "package": package}
    return {key: value for key, value in entry.items() if value}


def drop_foreign(entry: dict[str, Any], table: dict[str, Any]) -> None:
    """Leave out exports of what their home has from elsewhere, or computes: the alias could not find them there."""
    for home, words in list(entry.get("from", {}).items()):
        there = table.get(home, {})
        has = {*there.get("classes", {}), *there.get("values", {}), *there.get("functions", "").split(), "*"}
        has |= {word.partition("=")[0] for names in there.get("from", {}).values() for word in names.split()}
        has |= {name.rpartition(".")[2] for name in table if name.rpartition(".")[0] == home}
        kept = [word for word in words.split() if (word.partition("=")[2] or word) in has] if there is not entry else []
        entry["from"].pop(home)
        if kept:
            entry["from"][home] = " ".join(kept)


def main(sources: list[Path]) -> None:
    """Read source trees and write the files."""
    table: dict[str, Any] = {}
    for source in sources:
        for name, entry in modules_of(source).items():
            table[name] = merged(table[name], entry) if name in table else entry
    for entry in table.values():
        drop_foreign(entry, table)
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(table.items())]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(table)} modules, {OUT.stat().st_size} bytes")
    objects: dict[str, dict[str, dict[str, str]]] = {path: {"methods": {}, "attributes": {}} for path in OBJECTS}
    for source in reversed(sources):
        for path, kinds in objects_of(source).items():
            for kind, names in kinds.items():
                objects[path][kind].update(names)
    OBJECTS_OUT.write_text(json.dumps(objects, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
