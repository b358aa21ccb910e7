"""Bytes as tensors, and small objects as torch.save archives."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from offload.errors import ConfigError

PACKED = "packed by zero-infinity"


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

    Raises ConfigError: the bytes are damaged, or hold objects that only `trusted` allows.

    Args:
        data: the archive; a tensor is uint8, on the host.
        what: its name in errors.
        trusted: objects of any class may be made, which runs code that the bytes name.
    """
    stream = io.BytesIO(data if isinstance(data, bytes) else bytes_of(data))
    try:
        return torch.load(stream, map_location="cpu", weights_only=not trusted)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ImportError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error


def pack_any(value: Any) -> Any:
    """`value`, if its archive can be read without `trusted`; else a dict that holds its archive.

    For small states of users' objects, mostly of plain types.
    """
    archive = make_archive(value)
    try:
        read_archive(archive, "")
    except ConfigError:
        return {PACKED: bytes_tensor(archive)}
    return value


def unpack_any(value: Any, what: str) -> Any:
    """The inverse of `pack_any`; classes are trusted. Raises ConfigError if the archive is damaged."""
    if isinstance(value, dict) and value.keys() == {PACKED}:
        return read_archive(value[PACKED], what, trusted=True)
    return value
