"""zero-infinity: train models larger than memory by keeping their state on pinned CPU memory and NVMe.

The names users know from DeepSpeed: `initialize`, `Init`, `GatheredParameters`. They are imported when they are first
asked for: `import zero` itself costs nothing, which its light commands and `import deepspeed` under the alias rely on.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.api import *  # noqa: F403 - what type checkers see

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A public name or a submodule, imported now."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    api = import_module(f"{__name__}.api")
    if name not in (*api.__all__, "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
