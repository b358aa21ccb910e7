"""Names of DeepSpeed that stand for nothing here: importing them works, using them says what to do instead."""

from __future__ import annotations

import types
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

    home, _, function.__name__ = name.rpartition(".")
    function.__qualname__, function.__module__ = function.__name__, f"deepspeed.{home}"
    function.__doc__ = f"Not available: {instead}."
    return function


def missing_class(name: str, instead: str, base: type = object) -> Any:
    """A class that may be subclassed and asked `isinstance`, and raises when an object is made of it.

    One that derives from an exception is an exception like others: nobody raises it here, and `except` may name it.

    Args:
        name: as `refused`.
        instead: as `refused`.
        base: what it derives from, where clients count on it.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(name, instead)

    home, _, own = name.rpartition(".")
    body: dict[str, Any] = {"__doc__": f"Not available: {instead}.", "__module__": f"deepspeed.{home}"}
    if not issubclass(base, BaseException):
        body["__new__"] = __new__
    return types.new_class(own, (base,), {}, lambda namespace: namespace.update(body))
