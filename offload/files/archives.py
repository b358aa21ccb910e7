"""Bytes as tensors, and small objects as torch.save archives, which are read without running code that they name.

[Note: container] torch.distributed.checkpoint keeps each box of a tensor as one torch.save archive inside a data file.
torch itself makes the bytes around the payload (`torch.serialization.skip_data`). So asynchronous I/O can write
archives from any memory, and plain torch can read them.

[Note: plain objects] torch's weights-only loader calls what a file names, with arguments and states of the file, where
that is of a class that it is allowed to make. numpy's own `dtype.__setstate__` trusts them: it makes dtypes that take
bytes of the file for pointers. So numpy's names stand for classes of this module, which accept plain dtypes and arrays
of as many bytes as the file has. `restore` puts numpy's own values in their place.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import math
import os
import pathlib
import pickle
import re
import threading
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._weights_only_unpickler import _remove_safe_globals as remove_safe_globals

from offload.errors import ConfigError

PACKED = "packed by zero-infinity"
NAMES_SHOWN = 3
# Classes that users save with their weights and that torch refuses by default: to make one runs no code of the file.
HARMLESS: tuple[Any, ...] = (
    *(frozenset, slice, io.BytesIO, argparse.Namespace, types.SimpleNamespace),
    *(pathlib.PosixPath, pathlib.PurePosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)
# What a defaultdict may make; a file cannot call them while it is loaded.
FACTORIES = (bool, dict, float, int, list, str, tuple)
PLAIN_DTYPE = re.compile(r"[biufcMmSU][0-9]{1,9}")
TIME_UNIT = re.compile(r"[A-Za-z]{1,2}")
_REBUILD: Any = numpy.zeros(0).__reduce__()[0]
_SCALAR: Any = numpy.float64(0).__reduce__()[0]
_ALLOWING = threading.Lock()


def bytes_tensor(data: bytes) -> torch.Tensor:
    """The bytes as uint8; a copy."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of a uint8 tensor in host memory."""
    return bytes(tensor.numpy().tobytes())


def make_archive(value: Any) -> bytes:
    """The torch.save archive of `value`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read_archive(data: bytes | torch.Tensor, what: str, *, trusted: bool = False) -> Any:
    """The inverse of `make_archive`.

    Raises ConfigError: the bytes are damaged, or hold objects that only `trusted` allows; names their classes.

    Args:
        data: the archive; a tensor is uint8, on the host.
        what: its name in errors.
        trusted: objects of any class may be made, which runs code that the bytes name.
    """
    stream = io.BytesIO(data if isinstance(data, bytes) else bytes_of(data))
    try:
        if trusted:
            return torch.load(stream, map_location="cpu", weights_only=False)
        with allow_harmless() as plain:
            return plain.restore(torch.load(stream, map_location="cpu", weights_only=True))
    except Exception as error:  # damaged bytes can make the unpickler raise any error
        if trusted or _is_damaged(stream):
            raise ConfigError(f"{what} cannot be read: {type(error).__name__}: {refusal(error)}") from error
        refused = _unsafe_names(stream)
        names = ", ".join(refused[:NAMES_SHOWN])
        more = f" and {len(refused) - NAMES_SHOWN} more" if len(refused) > NAMES_SHOWN else ""
        description = f"made by {names}{more}" if refused else f"that is not plain ({refusal(error)})"
        alternative = f", or these by torch.serialization.add_safe_globals([{names}])" if refused else ""
        raise ConfigError(
            f"{what}: it holds an object {description}, which is not loaded, because loading it can run any code. If "
            'you trust the folder, allow all objects by load_checkpoint(allow_pickle=True) or "checkpoint": '
            f'{{"allow_pickle": true}}{alternative}'
        ) from error


def _is_damaged(stream: io.BytesIO) -> bool:
    """Whether an archive's bytes differ from those that were written."""
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.testzip() is not None
    except Exception:  # damaged bytes can make it raise any error
        return True


def _unsafe_names(stream: io.BytesIO) -> list[str]:
    """Classes and functions in an archive that torch's weights-only loader refuses; none if it cannot be read."""
    stream.seek(0)
    with suppress(Exception), allow_harmless():
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    return []


def pack_any(value: Any) -> Any:
    """`value`, if torch's weights-only loader reads it; else a dict that holds its archive.

    For small states of users' objects, mostly of plain types.
    """
    archive = make_archive(value)
    try:
        torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ImportError, AttributeError):
        return {PACKED: bytes_tensor(archive)}
    return value


def unpack_any(value: Any, what: str, *, trusted: bool) -> Any:
    """The inverse of `pack_any`. Raises ConfigError as `read_archive`."""
    if isinstance(value, dict) and value.keys() == {PACKED}:
        return read_archive(value[PACKED], what, trusted=trusted)
    return value


# ---- archives without their payload (see the note) --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """The bytes before and after a payload."""

    head: bytes
    tail: bytes


BARE = Container(b"", b"")  # The payload is an archive already.


@lru_cache(maxsize=4096)
def container(dtype: torch.dtype, sizes: tuple[int, ...]) -> Container:
    """The torch.save archive of a contiguous CPU tensor, without its bytes."""
    tensor = torch.empty(sizes, dtype=dtype, device="cpu")  # virtual memory only: it is never touched
    head, tail = archive_framing(tensor, [tensor], lambda loaded: [loaded])
    return Container(head, tail)


def archive_framing(
    value: Any, tensors: Sequence[torch.Tensor], tensors_in: Callable[[Any], Sequence[torch.Tensor]]
) -> list[bytes]:
    """The bytes of a value's torch.save archive before each tensor in it, and after the last one.

    Args:
        value: to be saved; the elements of its tensors are not read.
        tensors: the tensors in it, contiguous and on the CPU, in the order in which torch.save meets them.
        tensors_in: returns the same tensors of a value that was loaded.
    """
    fd = os.memfd_create("container", os.MFD_CLOEXEC)
    path = f"/proc/self/fd/{fd}"
    try:
        with torch.serialization.skip_data():
            torch.save(value, path)
        with FakeTensorMode():
            loaded = tensors_in(torch.load(path, weights_only=True))
        parts, position = [], 0
        for tensor, fake in zip(tensors, loaded, strict=True):
            storage: Any = fake.untyped_storage()  # of a fake tensor: it has the offset of its bytes in the file
            begin = int(storage._checkpoint_offset)
            parts.append(os.pread(fd, begin - position, position))
            position = begin + tensor.nbytes
        return [*parts, os.pread(fd, os.fstat(fd).st_size - position, position)]
    finally:
        os.close(fd)


# ---- plain objects (see the note) -------------------------------------------------------------------


class NotPlainError(ValueError):
    """A file has an object that is not made, because it is not of a plain type; the text names the type."""


class PlainObjects:
    """The objects of one load.

    Attributes:
        names: full name in a file -> what is called for it.

    Args:
        allow_unknown: the caller keeps objects of unknown classes. Then defaultdicts become dicts: their factories may
            be such classes, and a missing key is to be an error.
    """

    def __init__(self, *, allow_unknown: bool) -> None:
        self._allows_unknown = allow_unknown
        self._lists: dict[int, tuple[list[Any], int | None]] = {}
        self._dicts: dict[int, tuple[dict[Any, Any], Any]] = {}
        self.names: dict[str, Any] = {"numpy.dtype": PlainDtype, "numpy.ndarray": PlainArray}
        self.names |= {"builtins.range": PlainRange, "builtins.bytes": no_bytes}
        self.names.update({"collections.deque": self.make_deque, "collections.defaultdict": self.make_defaultdict})
        for core in ("core", "_core"):  # numpy's own functions, under the names of its old and new versions
            self.names |= {f"numpy.{core}.multiarray._reconstruct": empty_array}
            self.names |= {f"numpy.{core}.multiarray.scalar": plain_scalar}
        self._real_objects: dict[Any, Any] = {
            PlainDtype: numpy.dtype,
            PlainArray: numpy.ndarray,
            PlainRange: range,
            no_bytes: bytes,
        }
        self._real_objects |= {empty_array: _REBUILD, plain_scalar: _SCALAR}
        self._real_objects |= {self.make_deque: collections.deque, self.make_defaultdict: collections.defaultdict}
        for kind in () if allow_unknown else FACTORIES:
            self.names[f"builtins.{kind.__name__}"] = name = Name(kind.__name__)
            self._real_objects[name] = kind
        self._restored: dict[int, tuple[Any, Any]] = {}  # the first keeps the object, so that no other has its id

    def make_deque(self, items: Any = (), length_max: int | None = None) -> list[Any]:
        """A list, as torch appends to no other; `restore` makes the deque."""
        values = list(items)
        self._lists[id(values)] = values, length_max
        return values

    def make_defaultdict(self, factory: Any = None) -> dict[Any, Any]:
        """A dict, as torch sets items in no other; `restore` makes the defaultdict."""
        values: dict[Any, Any] = {}
        if not self._allows_unknown:
            self._dicts[id(values)] = values, factory
        return values

    def clear(self) -> None:
        """Drop what was loaded: methods in `names` make a cycle, which would keep files mapped."""
        for table in (self._lists, self._dicts, self._restored):
            table.clear()

    def restore(self, value: Any) -> Any:
        """`value` with the objects that it stands for; what contains them is changed in place where possible."""
        if isinstance(value, (type, types.FunctionType, types.MethodType, Name)):
            return self._real_objects.get(value, value)
        if isinstance(value, PlainDtype):
            return value.real
        if isinstance(value, PlainRange):
            return range(*value.bounds)
        if isinstance(value, (str, bytes, int, float, type(None))):
            return value
        if id(value) in self._restored:
            return self._restored[id(value)][1]
        self._restore_contents(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, PlainArray):
            attributes.update({key: self.restore(item) for key, item in attributes.items()})
        return self._restored[id(value)][1]

    def _restore_contents(self, value: Any) -> None:
        if isinstance(value, PlainArray):
            self._set_restored(value, numpy.array(value, subok=False, order="K"))
        elif type(value) in (dict, collections.OrderedDict, collections.Counter):
            self._restore_dict(value)
        elif type(value) is list:
            self._restore_list(value)
        elif type(value) is set:
            items = list(self._set_restored(value, value))
            value.clear()
            value.update(map(self.restore, items))
        elif isinstance(value, (tuple, frozenset)):
            self._restore_frozen(value)
        else:
            self._set_restored(value, value)

    def _set_restored(self, value: Any, restored: Any) -> Any:
        self._restored[id(value)] = value, restored
        return restored

    def _restore_dict(self, value: dict[Any, Any]) -> None:
        restored = value
        if id(value) in self._dicts:
            factory = self.restore(self._dicts[id(value)][1])
            if factory is not None and not callable(factory):
                raise NotPlainError(f"a defaultdict of {type(factory).__name__}")
            restored = collections.defaultdict(factory)
        self._set_restored(value, restored)
        items = [(self.restore(key), self.restore(item)) for key, item in value.items()]
        restored.clear()
        for key, item in items:  # a Counter's `update` would count
            restored[key] = item

    def _restore_list(self, value: list[Any]) -> None:
        if id(value) in self._lists:
            items: Any = self._set_restored(value, collections.deque(maxlen=self._lists[id(value)][1]))
            items.extend(map(self.restore, value))
        else:
            self._set_restored(value, value)[:] = map(self.restore, value)

    def _restore_frozen(self, value: tuple[Any, ...] | frozenset[Any]) -> None:
        originals = list(value)
        items = [self.restore(item) for item in originals]
        make: Any = getattr(value, "_make", type(value))  # of a named tuple
        is_same = all(item is restored for item, restored in zip(originals, items, strict=True))
        self._set_restored(value, value if is_same else make(items))


class Name:
    """Stands for a class that a file names and must not call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_arguments: Any) -> Any:
        raise NotPlainError(f"a call of {self._name}")


class PlainRange:
    """Stands for range, which could fill a set with more numbers than fit into memory."""

    def __init__(self, *bounds: int) -> None:
        self.bounds = bounds


def no_bytes() -> bytes:
    """Stands for bytes, which pickles call for empty ones."""
    return b""


class PlainDtype:
    """Stands for numpy.dtype: of bools, numbers, times and strings."""

    def __init__(self, text: str, align: Any = False, copy: Any = True) -> None:
        if type(text) is not str or not PLAIN_DTYPE.fullmatch(text):
            raise NotPlainError(f"numpy.dtype({text!r}), an object or structured dtype")
        self.real = numpy.dtype(text)
        if self.real.kind != text[0]:
            raise NotPlainError(f"numpy.dtype({text!r})")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, order, *subtypes, itemsize, alignment, flags = state[:8]
        real, metadata = self.real, state[8:]
        sizes = (itemsize, alignment, flags)
        if itemsize not in (-1, real.itemsize) or alignment not in (-1, real.alignment) or flags != real.flags:
            raise NotPlainError(f"numpy.dtype({real.str!r}) with other sizes or flags: {sizes}")
        if any(subtype is not None for subtype in subtypes) or order not in ("<", ">", "|", "="):
            raise NotPlainError("numpy.dtype with fields, a structured dtype")
        if real.kind in "Mm" and metadata:
            real = _time_dtype(real.kind, *metadata)
        elif metadata:
            raise NotPlainError(f"numpy.dtype({real.str!r}) with metadata")
        self.real = real.newbyteorder(order) if order in "<>" else real


def _time_dtype(kind: str, metadata: tuple[Any, tuple[bytes, int, int, int]]) -> numpy.dtype[Any]:
    """The dtype of a unit of time."""
    users, (unit, count, divisor, _event) = metadata
    text = unit.decode("ascii")
    if users or divisor != 1 or type(count) is not int or not 0 < count < 1 << 31:
        raise NotPlainError(f"numpy.dtype of {count}/{divisor} {text}")
    if text == "generic":
        return numpy.dtype(f"{kind}8")
    if not TIME_UNIT.fullmatch(text):
        raise NotPlainError(f"numpy.dtype of {text!r}")
    return numpy.dtype(f"{kind}8[{count}{text}]")


class PlainArray(numpy.ndarray[Any, Any]):
    """Stands for numpy.ndarray: of a plain dtype and of as many bytes as the file has."""

    def __new__(cls, *_arguments: Any) -> PlainArray:
        raise NotPlainError("numpy.ndarray, made without its contents")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.__dict__:  # numpy would free memory that a tensor may share
            raise NotPlainError("numpy.ndarray with two contents")
        shape, dtype, is_fortran, data = state[-4:]  # after a version, which very old files lack
        if not isinstance(dtype, PlainDtype) or type(data) is not bytes:
            raise NotPlainError("numpy.ndarray of objects, or of a structured dtype")
        if type(shape) is not tuple or any(type(length) is not int or length < 0 for length in shape):
            raise NotPlainError(f"numpy.ndarray of shape {shape!r}")
        real = dtype.real
        if math.prod(shape) * real.itemsize != len(data) or (real.itemsize == 0 and math.prod(shape) > 1):
            raise NotPlainError(f"numpy.ndarray of shape {shape} and dtype {real.str!r} with {len(data):,} bytes")
        contents: Any = (1, shape, real, bool(is_fortran), data)
        super().__setstate__(contents)
        self.__dict__["filled"] = True


def empty_array(kind: Any, *_place: Any) -> PlainArray:
    """Stands for numpy's `_reconstruct`."""
    if kind is not PlainArray:
        raise NotPlainError(f"an array of class {getattr(kind, '__name__', kind)}")
    array: PlainArray = numpy.ndarray.__new__(PlainArray, (0,), "b")
    return array


def plain_scalar(dtype: Any, data: Any = b"") -> Any:
    """Stands for numpy's `scalar`."""
    if not isinstance(dtype, PlainDtype) or type(data) is not bytes or len(data) != dtype.real.itemsize:
        raise NotPlainError("a numpy scalar of objects, or of a structured dtype")
    return _SCALAR(dtype.real, data)


def refusal(error: Exception) -> str:
    """Why torch's loader has refused an object, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # The line with the reason is between advice to load the file without `weights_only`, and a link.
    reason = lines[-2] if lines[0].startswith("Weights only load failed") and len(lines) > 2 else lines[0]
    return reason.rpartition("WeightsUnpickler error: ")[2]


def _full_name(allowed: Any) -> str:
    return str(allowed[1]) if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


@contextmanager
def allow_harmless(*, allow_unknown: bool = False) -> Iterator[PlainObjects]:
    """Let torch's weights-only loader make objects of `HARMLESS` classes, plain ones, and those that users allow.

    What was loaded must pass `restore` of the result. `allow_unknown`: as of `PlainObjects`.
    """
    plain = PlainObjects(allow_unknown=allow_unknown)
    kinds = {_full_name(kind): kind for kind in HARMLESS} | {
        name: (factory, name) for name, factory in plain.names.items()
    }
    with _ALLOWING:  # the allowed classes are a setting of the whole process; the user's own ones stay
        users = set(torch.serialization.get_safe_globals())
        added = [kind for kind in kinds.values() if kind not in users]
        hidden = [kind for kind in users if _full_name(kind) in {_full_name(kind) for kind in added}]
        remove_safe_globals(hidden)  # of two for one name torch would take any
        try:
            with torch.serialization.safe_globals(added):
                yield plain
        finally:
            torch.serialization.add_safe_globals(hidden)
            plain.clear()
