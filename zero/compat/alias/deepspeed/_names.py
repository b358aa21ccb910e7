"""The modules below `deepspeed`, made from two tables, `_ours.py` and `surface.json`, by one finder.

Modules are made when they are imported, and names are looked up when they are used, since `import deepspeed` must cost
nothing. Importing the package installs the finder, so every kind of child process has it.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ._ours import OURS, SAME

PACKAGE = "deepspeed"
SOURCE = '''"""`{name}` of the alias."""
import sys
from deepspeed._names import fill
fill({name!r}, sys.modules[__name__])
if __name__ == "__main__":
    sys.exit(sys.modules[__name__].main())
'''


def check_zero() -> None:
    """Raise ImportError now, not at the first name, if `zero` is not this library; loads nothing if it is."""
    spec = find_spec("zero")
    origin = Path(spec.origin or "") if spec else Path()
    if origin.is_file() and origin.read_bytes().startswith(b'"""zero-infinity: '):
        return
    try:
        trouble = importlib.import_module("offload.zero_name").trouble()
    except ModuleNotFoundError:
        trouble = f"zero-infinity is not installed for {sys.executable}; install it there"
    raise ImportError(f"deepspeed: this is the alias of zero-infinity: {trouble}", name=PACKAGE)


@functools.cache
def surface() -> dict[str, Any]:
    """Module below `deepspeed` -> its classes, functions, values, and its exports from other modules."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("surface.json").read_text(encoding="utf-8"))
    return table


def replacement_module(path: str) -> str | None:
    """The name of our module that is used as this one; None: this module has its own names."""
    return SAME["ops.op_builder"] if path.startswith("ops.op_builder.") else SAME.get(path)


class Names:
    """The `__getattr__` of a module. `path`: the module's path below `deepspeed`."""

    def __init__(self, path: str, module: ModuleType) -> None:
        self.path, self.module = path, module
        self.name = f"{PACKAGE}.{path}" if path else PACKAGE
        self.entry: dict[str, Any] = surface().get(path, {})
        self.homes = _homes(OURS.get(path, {}))
        self.exports: dict[str, str] = {}
        self.functions: list[str] = self.entry.get("functions", "").split()
        self.stars: list[str] = []
        if replacement_module(path) is None:
            modules = {_full_name(home): names for home, names in self.entry.get("from", {}).items()}
            self.stars = [home for home, names in modules.items() if names == "*"]
            self.exports = _homes({home: names for home, names in modules.items() if names != "*"})

    def __call__(self, name: str) -> Any:
        """The value of a name, which is then stored in the module. Raises AttributeError."""
        if name == "__all__":
            return sorted({*self.public_names()})
        value = self._look_up(name)
        setattr(self.module, name, value)
        return value

    def public_names(self) -> Iterator[str]:
        """Public names, without submodules."""
        tables = (self.homes, self.exports, self.entry.get("values", ()), self.entry.get("classes", ()), self.functions)
        yield from (name for names in tables for name in names if not name.startswith("_"))
        for home in self.stars:
            yield from importlib.import_module(home).__all__

    def _look_up(self, name: str) -> Any:
        if name in self.homes:
            return _load_attribute(self.homes[name])
        if self.entry.get("package") and self._below(name) in surface():
            return importlib.import_module(f"{self.name}.{name}")
        if name in self.exports:
            return _load_attribute(self.exports[name])
        if name in self.entry.get("values", ()):
            return self.entry["values"][name]
        if name in self.functions or name in self.entry.get("classes", ()):
            return self._make_unavailable(name)
        if not name.startswith("__"):
            for home in self.stars:
                if hasattr(importlib.import_module(home), name):
                    return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module {self.name!r} has no attribute {name!r}")

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _make_unavailable(self, name: str) -> Any:
        from zero.compat.unavailable import BASES, unavailable

        if name in self.functions:
            return unavailable(self._below(name), None)
        base = self.entry["classes"][name]
        is_in_module = base in self.entry["classes"] and base != name
        return unavailable(
            self._below(name), getattr(sys.modules[self.name], base) if is_in_module else BASES.get(base, object)
        )


def _full_name(home: str) -> str:
    return f"{PACKAGE}.{home}" if home else PACKAGE


def _load_attribute(place: str) -> Any:
    home, _, attribute = place.partition(":")
    return getattr(importlib.import_module(home), attribute)


def _homes(table: dict[str, str]) -> dict[str, str]:
    """Name -> "module:attribute"."""
    pairs = [(home, *word.partition("=")) for home, words in table.items() for word in words.split()]
    return {name: f"{home}:{attribute or name}" for home, name, _, attribute in pairs}


def fill(name: str, module: ModuleType) -> None:
    """Set up a new module as in the tables: it looks its names up, or is replaced by our module."""
    path = name.partition(".")[2]
    home = replacement_module(path)
    if home is None:
        module.__getattr__ = Names(path, module)  # type: ignore[method-assign]
        return
    target = importlib.import_module(home)
    sys.modules[module.__name__] = target
    if hasattr(module, "__path__"):
        target.__path__ = []
    if home.startswith(("zero.compat.", "zero.checkpointing")):
        target.__dict__.setdefault(
            "__getattr__", _first_of([Names(key, target) for key in surface() if replacement_module(key) == home])
        )


def _first_of(tables: list[Names]) -> Callable[[str], Any]:

    def __getattr__(name: str) -> Any:
        for table in tables:
            try:
                return table(name)
            except AttributeError as error:
                last = error
        raise last

    return __getattr__


class Finder(MetaPathFinder, InspectLoader):
    """Finds and makes the modules of `surface.json`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != PACKAGE or not below or below not in surface():
            return None
        # The origin becomes sys.argv[0] of `python -m`, which parsers of command lines read.
        return ModuleSpec(fullname, self, origin=fullname, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        return bool(surface()[fullname.partition(".")[2]].get("package"))

    def get_source(self, fullname: str) -> str:
        """The source that runs at the module's import, or with `python -m`."""
        return SOURCE.format(name=fullname)
