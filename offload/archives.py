"""Small things as torch.save makes them: in memory, as bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from offload.errors import ConfigError

PACKED = "packed by zero-infinity"


def make_archive(value: Any) -> torch.Tensor:
    """torch.save's bytes of `value`, uint8."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


def read_archive(data: torch.Tensor, what: str, *, trusted: bool = False) -> Any:
    """What `make_archive` was given.

    Args:
        data: its bytes.
        what: for errors.
        trusted: objects of any class may be made, which runs code that the bytes name.

    Raises:
        ConfigError: the bytes are damaged, or only `trusted` may make what they hold.
    """
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=not trusted)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ImportError, AttributeError) as error:
        raise ConfigError(f"{what}: cannot be read: {error}") from error


def pack_any(value: Any) -> Any:
    """`value`, if an archive that has it can be read by who trusts nobody; else its own archive.

    For small things that users' objects say of themselves, mostly in plain types.
    """
    archive = make_archive(value)
    try:
        read_archive(archive, "")
    except ConfigError:
        return {PACKED: archive}
    return value


def unpack_any(value: Any, what: str) -> Any:
    """What `pack_any` was given; classes are trusted. Raises ConfigError if it is damaged."""
    if isinstance(value, dict) and value.keys() == {PACKED}:
        return read_archive(value[PACKED], what, trusted=True)
    return value


def bytes_tensor(data: bytes) -> torch.Tensor:
    """The bytes as uint8; a copy."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
