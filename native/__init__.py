"""The C side of zero-infinity: memory, file I/O and kernels behind one header, opened with cffi.

Importing this package compiles nothing, starts nothing and never fails; `load()` does the work and
reports missing parts.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Native", "NativeUnavailable", "load", "load_cuda"]

_PACKAGE = Path(__file__).resolve().parent

TYPES = (
    *("float *", "float *[]", "int16_t *", "int64_t *", "uintptr_t", "void *", "void **", "void *[]"),
    *("zn_aio **", "zn_aio_completion[]", "zn_aio_fault *", "zn_aio_options *", "zn_aio_request *", "zn_aio_stats *"),
    *("zn_moments *", "zn_segment *", "zn_segment[]", "zn_square_sum *"),
)
"""The types that callers create and cast to by name."""


class NativeUnavailable(RuntimeError):
    """A native library cannot be used; the message says why and what to do.

    Attributes:
        reason: the same text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Native:
    """An open library.

    Attributes:
        ffi: the cffi `FFI` that read the header.
        lib: the functions and constants of include/zn_abi.h; every call releases the GIL.
        path: the file that was opened.
    """

    ffi: Any
    lib: Any
    path: Path

    def __post_init__(self) -> None:
        """Have cffi look up all names and types now.

        By default it does so at first use, under a lock. During that, garbage collection on the same thread may close
        an unreferenced engine, which calls functions of the library: these calls must not need the lock.
        """
        for ctype in TYPES:
            self.ffi.typeof(ctype)
        for name in dir(self.lib):
            getattr(self.lib, name, None)  # each library has only some of the header's functions


def load() -> Native:
    """Open libzn.so, once per process.

    Raises NativeUnavailable: disabled by ZERO_NATIVE=0, not built, stale, or not loadable.
    """
    _check_enabled()
    return _open(cuda=False)


def load_cuda() -> Native:
    """Open libzn_cuda.so, once per process; no GPU is needed to open it.

    Raises NativeUnavailable: disabled by ZERO_NATIVE=0, not built, stale, or not loadable.
    """
    _check_enabled()
    return _open(cuda=True)


def _check_enabled() -> None:
    if os.environ.get("ZERO_NATIVE") == "0":
        raise NativeUnavailable("disabled by ZERO_NATIVE=0")


@functools.cache
def _ffi() -> Any:
    try:
        import cffi
    except ImportError as error:
        raise NativeUnavailable(f"cffi cannot be imported ({error}); pip install cffi") from error

    header = (_PACKAGE / "include" / "zn_abi.h").read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(header.partition("/* CDEF BEGIN */")[2].partition("/* CDEF END */")[0])
    return ffi


@functools.cache
def _open(*, cuda: bool) -> Native:
    from native.build import LIBZN, LIBZN_CUDA, REBUILD_COMMAND, source_hash

    library = LIBZN_CUDA if cuda else LIBZN
    ffi, path = _ffi(), _PACKAGE / library.name
    if not path.is_file():
        compiler = library.compilers[0]
        raise NativeUnavailable(f"{path} was not built (it needs {compiler}); run: {REBUILD_COMMAND}")
    try:
        lib = ffi.dlopen(str(path))
        built_from = ffi.string(lib.zn_source_hash()).decode()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be opened: {error}; run: {REBUILD_COMMAND}") from error
    expected = source_hash(library)
    if built_from != expected:
        raise NativeUnavailable(
            f"{path} is out of date: it was built from sources {built_from}, and the sources are now {expected}; run: "
            f"{REBUILD_COMMAND}"
        )
    return Native(ffi=ffi, lib=lib, path=path)
