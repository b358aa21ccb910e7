"""Names of DeepSpeed that stand for nothing here: importing them works, using them says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refused(name: str, instead: str) -> NotImplementedError:
    """The error of a use.

    Args:
        name: DeepSpeed's dotted name.
        instead: what a user can do.
    """
    return NotImplementedError(f"deepspeed.{name}: not available in zero-infinity; {instead}")


def missing_function(name: str, instead: str) -> Callable[..., Any]:
    """A function that raises NotImplementedError when it is called; arguments as `refused`."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise refused(name, instead)

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"Not available: {instead}."
    return function


def missing_class(name: str, instead: str, base: type = object) -> Any:
    """A class that may be subclassed and asked `isinstance`, and raises when an object is made of it.

    Args:
        name: as `refused`.
        instead: as `refused`.
        base: what it derives from, where clients count on it.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(name, instead)

    return type(name.rpartition(".")[2], (base,), {"__new__": __new__, "__doc__": f"Not available: {instead}."})
