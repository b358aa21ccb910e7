"""Bytes as tensors, and small objects as torch.save archives, which are read without running code that they name."""

from __future__ import annotations

import io
import pickle
import zipfile
from contextlib import suppress
from typing import Any

import torch

from offload.errors import ConfigError
from offload.plain_objects import allow_harmless, refusal

PACKED = "packed by zero-infinity"
NAMES_SHOWN = 3


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
