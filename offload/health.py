"""Checks which parts of this layer work on this machine, with the reason for each that does not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import native
from offload.accelerator import has_gpu
from offload.disk.aio import AioOptions, open_aio
from offload.disk.aio_base import BACKENDS
from offload.errors import ZeroInfinityError
from offload.memory.host_memory import map_host, tensor_over
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import PAGE_BYTES

TRIED_BYTES = 2 << 20


def library_trouble(load: Callable[[], native.Native]) -> str:
    """Why a native library cannot be used; empty if it can."""
    try:
        load()
    except native.NativeUnavailable as error:
        return error.reason
    return ""


def cpu_library_trouble() -> str:
    """Why libzn.so cannot be used; empty if it can."""
    return library_trouble(native.load)


def cuda_library_trouble() -> str:
    """Why libzn_cuda.so cannot be used; empty if it can. It opens without a GPU."""
    return library_trouble(native.load_cuda)


def io_backends() -> dict[str, str]:
    """Backend of the I/O engine -> why it cannot be used (empty if it can); best first."""
    troubles: dict[str, str] = {}
    for name in BACKENDS[1:]:
        try:
            open_aio(AioOptions(backend=name)).close()
            troubles[name] = ""
        except ZeroInfinityError as error:
            troubles[name] = str(error)
    return troubles


def io_choice() -> tuple[str, str]:
    """The backend that "auto" takes, and its `reason` after memory was registered with it."""
    aio = open_aio(AioOptions())
    try:
        unregister = aio.register_memory(tensor_over(map_host(TRIED_BYTES)))
        unregister()
        return aio.backend, aio.reason
    finally:
        aio.close()


def direct_io_trouble(folder: Path) -> str:
    """Why files below `folder` cannot bypass the page cache; empty if they can.

    Raises OSError: no file can be made there.
    """
    with tempfile.TemporaryDirectory(prefix="zero-doctor-", dir=folder) as place:
        try:
            descriptor = os.open(Path(place) / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            return f"the file system does not support O_DIRECT ({error.strerror})"
        try:
            os.pwrite(descriptor, map_host(PAGE_BYTES), 0)
        except OSError as error:
            return f"writing with O_DIRECT: {error.strerror}"
        finally:
            os.close(descriptor)
    return ""


def shared_memory_trouble() -> str:
    """Why processes cannot share nameless memory; empty if they can."""
    try:
        memory = SharedHostMemory(TRIED_BYTES, "a test of shared memory")
        memory.close()
    except (ZeroInfinityError, OSError) as error:
        return str(error)
    return ""


def pinning_trouble() -> str:
    """Why host memory cannot be page-locked for the GPU; empty if it can, or if there is no GPU."""
    from offload.memory.host_memory import pin

    if not has_gpu():
        return ""
    data = tensor_over(map_host(TRIED_BYTES))
    undo = pin(data)
    if undo is None:
        return "the driver refused, or there are no CUDA kernels"
    undo()
    return ""
