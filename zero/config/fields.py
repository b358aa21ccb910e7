"""Types of the keys of a configuration, and what is known of those that do nothing.

A key that acts is a field of a `ConfigBlock`. Others are rows of `zero.config.inactive_keys`:

- a reason, or `Inert`: known, but without effect; a user who sets it sees the reason once.
- `Refused`: any value but some would change the results or break a promise.
- `InactiveBlock`: a block in which no key acts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import Self

from zero.config.numbers import parse_count, parse_integer, parse_number


@dataclass(frozen=True)
class Inert:
    """The key has no effect. In the tables a bare reason stands for one without a default."""

    reason: str  # Shown in the list at the start and in the docs.
    default: object = None


@dataclass(frozen=True)
class Refused:
    """The key has only these values; none: it must be absent."""

    fix: str
    allowed: tuple[object, ...] = (False,)  # The first is the default, but where they are words, which may be a list.

    @property
    def default(self) -> object:
        return next((value for value in self.allowed if not isinstance(value, str)), None)

    def read(self, value: object) -> object:
        """The allowed value that this one means. Raises ValueError: it is not allowed; the text says what is."""
        words = [word for word in self.allowed if isinstance(word, str)]
        if words and isinstance(value, (list, tuple)) and all(word in words for word in value):
            return tuple(value)
        for allowed in self.allowed:
            parse: Callable[[object], object] = parse_flag if isinstance(allowed, bool) else parse_number
            with suppress(ValueError):
                if value == allowed if isinstance(allowed, str) else parse(value) == allowed:
                    return allowed
        raise ValueError(" or ".join(map(short_json, self.allowed)) or "this key to be absent")


@dataclass(frozen=True, eq=False)
class InactiveBlock:
    """A block in which no key acts; its attributes mean what those of `ConfigBlock` do."""

    shorthands: ClassVar[Mapping[bool, Mapping[str, object]]] = {}

    rows: Mapping[str, Row]
    about: str = ""
    is_open: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


Row = str | Inert | Refused | InactiveBlock


def default_of(row: Row) -> object:
    """What holds where such a key is not given."""
    return row.default if isinstance(row, (Inert, Refused)) else None


class ConfigBlock(BaseModel):
    """One JSON object of the configuration: frozen, and closed to unknown keys."""

    # Keys that do nothing are kept beside the fields as they were given.
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    rows: ClassVar[Mapping[str, Row]] = {}
    """Its keys that do nothing, and blocks in it in which none acts."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other spellings of this block's keys."""

    shorthands: ClassVar[Mapping[bool, Mapping[str, object]]] = {}
    """The blocks that true and false mean in place of this block; empty: they mean nothing."""

    is_open: ClassVar[bool] = False
    """DeepSpeed picks its keys out of this block and passes over all others; under its name they are a warning."""

    @classmethod
    def extra_keys(cls, key: str, raw: Mapping[Any, Any]) -> Collection[str]:
        """Keys that the inner block `key` accepts besides its declared ones, depending on other keys of this block.

        `key`: canonical name of a key of this block; `raw`: this block as the user wrote it.
        """
        return ()

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in self.rows:
                raise problem("a known key", at=name, got=short_json(value), keys=(name,))
        return self

    if not TYPE_CHECKING:  # Else it would answer for misspelt keys too.

        def __getattr__(self, name: str) -> Any:
            """A key that does nothing: as it was given, else its default."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name not in self.rows:
                    raise
                return default_of(self.rows[name])


AnyBlock = type[ConfigBlock] | InactiveBlock


def problem(
    expected: str, *, fix: str = "", at: str = "", got: str | None = None, keys: tuple[str, ...] = ()
) -> PydanticCustomError:
    """Make an error that the loader can turn into one line.

    Args:
        expected: the correct form.
        fix: the remedy, if it is not obvious.
        at: key inside the block that reports the problem; empty for the block itself.
        got: the value found, if it is not simply the value of the key.
        keys: keys of the block that take part in a contradiction.
    """
    context = {"expected": expected, "fix": fix, "at": at, "keys": keys}
    if got is not None:
        context["got"] = got
    return PydanticCustomError("zero_config", "expected {expected}", context)


def short_json(value: object) -> str:
    """The value in JSON, shortened to one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def world_size_of(info: ValidationInfo) -> int:
    """The number of ranks for which a configuration is checked."""
    return int((info.context or {}).get("world_size", 1))


@dataclass(frozen=True)
class Deprecated:
    """The key still acts, but another one should be used."""

    note: str


@dataclass(frozen=True)
class MeansAuto:
    """A key for which "auto" has a meaning; any other key counts as absent if it is "auto"."""


AUTO = "auto"
MEANS_AUTO = MeansAuto()


def reads(parse: Callable[[object], object]) -> BeforeValidator:
    """Make a validator from a parser whose ValueError says what was expected."""

    def read(value: object) -> object:
        try:
            return parse(value)
        except PydanticCustomError:
            raise
        except ValueError as error:
            raise problem(str(error)) from None

    return BeforeValidator(read)


def several(parse: Callable[[object], object], expected: str, count: int | None = None) -> BeforeValidator:
    """Read a list whose items `parse` reads, as a tuple; `count`: the required number of items."""

    def read(value: object) -> tuple[object, ...]:
        if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
            raise ValueError(expected)
        return tuple(map(parse, value))

    return reads(read)


def one_of(*allowed: int, expected: str) -> BeforeValidator:
    """Read a whole number that is one of these."""

    def read(value: object) -> int:
        with suppress(ValueError):
            if (number := parse_integer(value)) in allowed:
                return number
        raise ValueError(expected)

    return reads(read)


class _InAnyCase:
    """Read a word of a `Literal`, in upper or lower case."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        words = words_in(source)

        def read(value: object) -> str:
            if isinstance(value, str) and value.lower() in words:
                return value.lower()
            raise problem(" or ".join(map(short_json, words)))

        return core_schema.no_info_before_validator_function(read, handler(source))


def words_in(annotation: Any) -> list[str]:
    """The words that a key's type allows, if it restricts them."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [word for word in parts if isinstance(word, str)]
    return [word for part in parts for word in words_in(part)]


def parse_flag(value: object) -> bool:
    """Read true or false, also as a word or as 1 or 0. Raises ValueError: another value."""
    if isinstance(value, bool):
        return value
    words: dict[object, bool] = {"true": True, "false": False, 1: True, 0: False}
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, (str, int)) and word in words:
        return words[word]
    raise ValueError("true or false")


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


Flag = Annotated[bool, reads(parse_flag)]
Integer = Annotated[int, reads(parse_integer)]
Count = Annotated[int, reads(parse_count)]
Number = Annotated[float, reads(parse_number)]
Text = Annotated[str, reads(_parse_text)]
_Words = TypeVar("_Words")
Word = Annotated[_Words, _InAnyCase()]  # One of the words of a `Literal`: `Word[Literal["on", "off"]]`.


def kinds_of(annotation: Any) -> set[Any]:
    """The Python types that a key's value may have after reading, except None."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds_of(parts[0])
    if origin is Literal:
        return {type(part) for part in parts}
    if origin in (Union, UnionType):
        return set().union(*map(kinds_of, parts)) - {type(None)}
    return {origin or annotation}
