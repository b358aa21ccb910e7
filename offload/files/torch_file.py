"""Files of torch.save, and plain arrays on disk, read by range; other objects are unpickled without running code.

Tensors are mapped while a file's objects are built, so opening costs no memory. Afterwards only their places in the
file are kept, and ranges are read with system calls: an error of the disk is then an exception, not a signal.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import os
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError, StorageError
from offload.files.archives import NotPlainError, allow_harmless, refusal
from offload.io.init_file import read_into
from offload.system.regular_files import open_regular, report_read_errors


class UnknownObject:
    """Replaces an object of a class that is not loaded, and keeps its contents. No code of that class runs.

    `args`: the arguments of the class. `state`: the argument of `__setstate__`; None if it was not called.
    """

    name: ClassVar[str] = ""

    def __init__(self, *args: Any) -> None:
        """Accept any arguments: pickle calls the class, or only `__new__`."""

    def __new__(cls, *args: Any) -> UnknownObject:
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """An array in a file.

    `offset_bytes`: of its first element; `layout`: (shape, strides) if its elements are not contiguous.
    """

    path: Path
    offset_bytes: int
    numel: int
    dtype: torch.dtype
    layout: tuple[torch.Size, tuple[int, ...]] | None = None

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Read elements from `begin` on into all of `out`, which is 1-D and of the same dtype.

        If the elements are not contiguous, all bytes from the first to the last are read. Raises StorageError: the
        file cannot be read, or is shorter than before.
        """
        if self.layout is None:
            read_range(self.path, self.offset_bytes + begin * self.dtype.itemsize, out)
            return
        shape, strides = self.layout
        span = torch.empty(
            1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), dtype=self.dtype, device="cpu"
        )
        read_range(self.path, self.offset_bytes, span)
        out.copy_(span.as_strided(shape, strides).reshape(-1)[begin : begin + out.numel()])


def read_range(path: Path, offset: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous, from byte `offset` of a file. Raises StorageError."""
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            read_into(file.fileno(), offset, out, "reading a checkpoint", path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError.from_os_error(error, "reading a checkpoint", path, offset) from error


class TorchFile:
    """A file that torch.save wrote. Raises ConfigError: it is missing, is no such file, is cut short or damaged.

    Attributes:
        contents: the saved value. Its tensors are mapped: use `locate` for the large ones and copy the small ones,
            then drop it.

    Args:
        wanted: describes the expected file in errors.
    """

    def __init__(self, path: Path, wanted: str) -> None:
        self.path = path
        with report_read_errors(path, COPY):
            if not path.is_file():
                raise ConfigError(f"{path}: missing; expected {wanted}. {COPY}")
            self._nbytes = path.stat().st_size
        try:
            self.contents = _load(path)
        except Exception as error:
            # Damaged bytes can make the unpickler raise any error: the cause is the file.
            is_refused = isinstance(error, pickle.UnpicklingError) and refusal(error).startswith(REFUSED)
            if is_refused or isinstance(error, NotPlainError):
                raise ConfigError(
                    f"{path}: {refusal(error)}. Objects of unknown classes are not loaded, and this object cannot be "
                    "left out; save it as plain dicts, lists, numbers and strings"
                ) from error
            raise ConfigError(
                f"{path}: expected {wanted}, as torch.save has written it since torch 1.6; the file is truncated, "
                f"damaged or of another format ({type(error).__name__}: {refusal(error)}). {COPY}"
            ) from error
        self._mappings = _Mappings(path)

    def locate(self, tensor: torch.Tensor) -> FileTensor:
        """The place of a tensor of `contents` in the file. Raises ConfigError: it is larger than the file."""
        if tensor.numel() * tensor.element_size() > self._nbytes:  # a view can repeat an element any number of times
            raise ConfigError(
                f"{self.path}: it has {self._nbytes:,} bytes, but a tensor of shape {tuple(tensor.shape)}. {COPY}"
            )
        if tensor.numel() == 0:
            return FileTensor(self.path, 0, 0, tensor.dtype)
        layout = None if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        return FileTensor(self.path, self._mappings.offset_of(tensor.data_ptr()), tensor.numel(), tensor.dtype, layout)


REFUSED = ("Can only", "Trying to")
COPY = "Copy the folder again, or load another tag"


def _load(path: Path) -> Any:
    with allow_harmless(allow_unknown=True) as plain:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_unknown_class(name), name) for name in unknown]):
            return plain.restore(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _unknown_class(name: str) -> type[UnknownObject]:
    module, _, short = name.rpartition(".")
    return type(short, (UnknownObject,), {"name": name, "__module__": module})


class _Mappings:
    """The mappings of a file in this process: converts addresses to file offsets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        inode, name = path.stat().st_ino, str(path.resolve())
        self._ranges: list[tuple[int, int, int]] = []
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            addresses, _, offset, _device, number, *names = line.split(maxsplit=5)
            # On layered file systems the inode here differs from the one of stat, hence the name.
            if int(number) == inode or name in names:
                begin, _, end = addresses.partition("-")
                self._ranges.append((int(begin, 16), int(end, 16), int(offset, 16)))
        self._ranges.sort()

    def offset_of(self, address: int) -> int:
        place = bisect.bisect_right(self._ranges, address, key=lambda mapping: mapping[0]) - 1
        if place < 0 or address >= self._ranges[place][1]:
            raise ConfigError(
                f"{self._path}: its file system does not allow mapping it into memory; copy it to a local disk"
            )
        begin, _, offset = self._ranges[place]
        return address - begin + offset


def replace_unknown(value: Any, where: str, convert: Callable[[UnknownObject], Any]) -> Any:
    """A copy of `value` in new memory, with all unknown objects replaced by results of `convert`.

    Raises ConfigError: there is an unknown object that `convert` does not know; names its class and place.

    Args:
        value: of dicts, lists, tuples, sets, namespaces and plain values.
        where: name of `value` in errors.
        convert: returns the value that an unknown object stands for, or the object itself if it does not know it.
    """
    if isinstance(value, UnknownObject):
        converted = convert(value)
        if converted is value:
            raise ConfigError(
                f"{where}: an object of class {value.name} is not loaded, because loading it could run any code. If "
                f"you trust the file, call torch.serialization.add_safe_globals([{value.name}]) first"
            )
        return replace_unknown(converted, where, convert)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        named = {key: replace_unknown(item, f"{where}.{key}", convert) for key, item in vars(value).items()}
        return type(value)(**named)
    if isinstance(value, dict):
        items = [
            (replace_unknown(key, f"a key of {where}", convert), replace_unknown(item, f"{where}[{key!r}]", convert))
            for key, item in value.items()
        ]
        return type(value)(items) if type(value) in (dict, collections.OrderedDict) else dict(items)
    if type(value) is collections.deque:
        return collections.deque(replace_unknown(list(value), where, convert), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(replace_unknown(item, f"{where}[{place}]", convert) for place, item in enumerate(value))
    return value
