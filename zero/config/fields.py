"""Types and roles of configuration keys: a key acts, is inert, or refuses values.

The role of a key is declared with the key, as a marker in its annotation:

- no marker: the key acts.
- `Inert(reason)`: known, but without effect; a user who sets it sees the reason once. `INERT` takes its reason from
  `Block.why`, which the inert keys of a block share.
- `Only(...)`: any other value would change the results or break a promise, so it is refused.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from zero.config.numbers import parse_count, parse_integer, parse_number

Role = Literal["acts", "inert", "refused"]


class ConfigBlock(BaseModel):
    """One JSON object of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other spellings of this block's keys."""

    shorthands: ClassVar[Mapping[bool, Mapping[str, object]]] = {}
    """The blocks that true and false mean in place of this block; empty: they mean nothing."""

    is_open: ClassVar[bool] = False
    """DeepSpeed picks its keys out of this block and passes over all others; under its name they are a warning."""

    why: ClassVar[str] = ""
    """The reason why inert keys of this block have no effect, for keys without their own reason."""

    @classmethod
    def extra_keys(cls, key: str, raw: Mapping[Any, Any]) -> Collection[str]:
        """Keys that the inner block `key` accepts besides its declared ones, depending on other keys of this block.

        `key`: canonical name of a key of this block; `raw`: this block as the user wrote it.
        """
        return ()

    @classmethod
    def is_off(cls, raw: Mapping[Any, Any]) -> bool:
        """True if the block, as it was read, is switched off."""
        try:
            return "enabled" in cls.model_fields and not parse_flag(raw.get("enabled"))
        except ValueError:
            return False


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
class Inert:
    """The key is known, but has no effect."""

    reason: str = ""  # Shown in the list at the start and in the docs. Empty: the reason is `Block.why`.


@dataclass(frozen=True)
class Only:
    """Refuse all values except these."""

    allowed: tuple[object, ...]
    fix: str

    def check(self, value: object) -> object:
        """Return the value if it is allowed. Raises PydanticCustomError: it is not."""
        if value in self.allowed:
            return value
        values = " or ".join(map(short_json, self.allowed))
        raise problem(values or "this key to be absent", fix=self.fix)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Run `check` after the check of the key's type."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class Deprecated:
    """The key still acts, but another one should be used."""

    note: str


@dataclass(frozen=True)
class MeansAuto:
    """A key for which "auto" has a meaning; any other key counts as absent if it is "auto"."""


AUTO = "auto"
INERT = Inert()
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


def _parse_free(value: object) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise ValueError("an object {...}")
    return dict(value)


Flag = Annotated[bool, reads(parse_flag)]
Integer = Annotated[int, reads(parse_integer)]
Count = Annotated[int, reads(parse_count)]
Number = Annotated[float, reads(parse_number)]
Text = Annotated[str, reads(_parse_text)]
_Words = TypeVar("_Words")
Word = Annotated[_Words, _InAnyCase()]  # One of the words of a `Literal`: `Word[Literal["on", "off"]]`.

InertFlag = Annotated[Flag | None, INERT]
InertInteger = Annotated[Integer | None, INERT]
InertCount = Annotated[Count | None, INERT]
InertNumber = Annotated[Number | None, INERT]
InertText = Annotated[Text | None, INERT]
InertItems = Annotated[tuple[Any, ...] | None, INERT, several(lambda item: item, "a list")]
InertObject = Annotated[dict[Any, Any] | None, INERT, reads(_parse_free)]  # Its keys are the user's own names.
InertAny = Annotated[Any, INERT]


def block_of(field: FieldInfo) -> type[ConfigBlock] | None:
    """The block that a key holds; None for a key that holds a value."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((part for part in candidates if isinstance(part, type) and issubclass(part, ConfigBlock)), None)


def has_field_type(field: FieldInfo, value: object) -> bool:
    """True if a value has the type of a key, even if the key refuses this value."""
    return any(kind is Any or _has_type(kind, value) for kind in kinds_of(field.annotation))


def _has_type(kind: Any, value: object) -> bool:
    if kind not in (bool, int, float):
        return isinstance(value, (list, tuple) if kind is tuple else kind)
    try:  # numbers and flags may be words
        (parse_flag if kind is bool else parse_number)(value)
    except ValueError:
        return False
    return True


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


def role_of(field: FieldInfo) -> Role:
    """Whether the key acts, is inert, or refuses values."""
    if any(isinstance(marker, Inert) for marker in field.metadata):
        return "inert"
    return "refused" if any(isinstance(marker, Only) for marker in field.metadata) else "acts"


def reason_of(field: FieldInfo, block: type[ConfigBlock]) -> str:
    """Why an inert key of a block changes nothing; empty for other keys."""
    reasons = [marker.reason for marker in field.metadata if isinstance(marker, Inert)]
    return next((reason for reason in reasons if reason), block.why) if reasons else ""


def means_auto(field: FieldInfo) -> bool:
    return any(isinstance(marker, MeansAuto) for marker in field.metadata)


@dataclass(frozen=True)
class Key:
    """One known key: its canonical dotted path and its declaration."""

    path: str
    field: FieldInfo
    role: Role
    block: type[ConfigBlock]  # The block that declares it.

    @property
    def reason(self) -> str:
        return reason_of(self.field, self.block)


@functools.cache
def known_keys(model: type[ConfigBlock], prefix: str = "") -> tuple[Key, ...]:
    """Every key of a block and of its inner blocks, outer keys first, in the order of declaration."""
    fields = model.model_fields.items()
    own = [Key(prefix + name, field, role_of(field), model) for name, field in fields]
    inner = [(name, block) for name, field in fields if (block := block_of(field)) is not None]
    return (*own, *itertools.chain.from_iterable(known_keys(block, f"{prefix}{name}.") for name, block in inner))
