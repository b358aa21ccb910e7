"""Bytes as tensors, and small objects as torch.save archives, which are read without running code that they name."""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import pickle
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch

from offload.errors import ConfigError

PACKED = "packed by zero-infinity"
NAMES_SHOWN = 3
# Classes that users save with their weights and that torch refuses by default: to make one runs no code of the file.
HARMLESS: tuple[Any, ...] = (
    *(frozenset, argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, pathlib.PurePosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(numpy.ndarray, numpy.dtype, *(type(numpy.dtype(kind)) for kind in "?bhilqBHILQefdFDUS")),
)
_REBUILD: Any = numpy.zeros(0).__reduce__()[0]
_SCALAR: Any = numpy.float64(0).__reduce__()[0]
# numpy's own functions, under the names of its old and new versions.
NUMPY = tuple(
    (function, f"numpy.{core}.multiarray.{name}")
    for core in ("core", "_core")
    for function, name in ((_REBUILD, "_reconstruct"), (_SCALAR, "scalar"))
)
_ALLOWING = threading.Lock()


@contextmanager
def allow_harmless(*more: Any) -> Iterator[None]:
    """Let torch's weights-only loader make objects of `HARMLESS` classes, of `more`, and of those that users allow."""
    with _ALLOWING:  # the allowed classes are a setting of the whole process; the user's own ones stay
        users = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([kind for kind in (*HARMLESS, *NUMPY, *more) if kind not in users]):
            yield


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
        with allow_harmless():
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make the unpickler raise any error
        strange = [] if trusted else _unsafe_names(stream)
        if not strange:
            raise ConfigError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
        names = ", ".join(strange[:NAMES_SHOWN])
        more = f" and {len(strange) - NAMES_SHOWN} more" if len(strange) > NAMES_SHOWN else ""
        raise ConfigError(
            f"{what}: it holds an object made by {names}{more}, which is not loaded, because loading it can run any "
            "code. If you trust the folder, allow all objects by load_checkpoint(allow_pickle=True) or "
            f'"checkpoint": {{"allow_pickle": true}}, or these by torch.serialization.add_safe_globals([{names}])'
        ) from error


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
