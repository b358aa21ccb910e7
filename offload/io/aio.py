"""Asynchronous file I/O: opens the best backend that works here; all have one interface."""

from __future__ import annotations

import native
from offload.errors import ConfigError
from offload.io.aio_base import BACKENDS, NATIVE_BACKENDS, Aio, AioFault, AioOptions, AioStats
from offload.io.aio_fallback import AiofilesAio
from offload.io.aio_native import NativeAio, open_native
from offload.io.io_loop import IoLoop

__all__ = ["Aio", "AioFault", "AioOptions", "AioStats", "AiofilesAio", "NativeAio", "open_aio", "open_aio_loop"]


def open_aio(options: AioOptions) -> Aio:
    """Open the backend that `options` names, or for "auto" the best that works.

    Returns the engine; its `reason` says why this backend was chosen, and why better ones failed. Raises ConfigError:
    the named backend does not work here; the message says why.
    """
    if options.backend == "aiofiles":
        return AiofilesAio(options, "aiofiles: chosen by the configuration")
    is_auto = options.backend == "auto"
    try:
        library = native.load()
    except native.NativeUnavailable as error:
        if is_auto:
            return AiofilesAio(options, f"aiofiles: no native library ({error.reason})")
        raise _cannot_use(options.backend, error.reason) from error
    failures: list[str] = []
    for backend in NATIVE_BACKENDS if is_auto else (options.backend,):
        opened = open_native(library, backend, options)
        if isinstance(opened, NativeAio):
            opened.reason = f"{backend}: {_why(is_auto, failures)}"
            return opened
        if not is_auto:
            raise _cannot_use(backend, opened)
        failures.append(f"{backend} {opened}")
    return AiofilesAio(options, f"aiofiles: {_why(is_auto, failures)}")


def open_aio_loop(options: AioOptions) -> tuple[Aio, IoLoop]:
    """An engine and an I/O loop for it alone. Raises as `open_aio`; if the thread cannot start, nothing stays open."""
    aio = open_aio(options)
    try:
        return aio, IoLoop(aio.in_flight, lambda: aio.stats().chunks)
    except BaseException:
        aio.close()
        raise


def _why(is_auto: bool, failures: list[str]) -> str:
    if not is_auto:
        return "chosen by the configuration"
    return ", ".join(failures) or "best available"


def _cannot_use(backend: str, reason: str) -> ConfigError:
    return ConfigError(
        f'aio backend: "{backend}" cannot be used: {reason}; use "auto", or another of {", ".join(BACKENDS[1:])}'
    )
