"""Module attributes that are imported when they are first asked for: `import deepspeed` has to cost nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__`: names from elsewhere, and its submodules.

    Args:
        module: its `__name__`; a package.
        names: attribute -> "package.module" or "package.module:attribute".
    """
    known = names or {}

    def __getattr__(name: str) -> Any:
        if name in known:
            home, _, attribute = known[name].partition(":")
            value: Any = importlib.import_module(home)
            value = getattr(value, attribute) if attribute else value
            setattr(sys.modules[module], name, value)
            return value
        if not name.startswith("__"):
            path = f"{module}.{name}"
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
