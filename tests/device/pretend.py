"""A pretend GPU: importing this makes a torch for the CPU see one `cuda` device, and the product its CUDA kernels.

Import it before torch, in a process of its own (also as a pytest plugin: `-p pretend`). Device memory cannot be read by
the host, freed memory turns to NaN, and work on a stream runs no earlier than the mode says (see scheduler.h), so that
what forgets to wait computes something else. There is one device, and it takes no time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pretend_build

MODES = ("eager", "late", "random", "copies", "compute", "alone")
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
NAME = "a pretend GPU"
CAPABILITY = (9, 0)


class Statistics(ctypes.Structure):
    """What the device counts; `pinned` is the number of page-locked pieces of host memory."""

    _names = "requested_bytes allocated_bytes peak_bytes reserved_bytes limit_bytes segments pinned tasks"
    _fields_ = [(name, ctypes.c_uint64) for name in _names.split()]


def _open() -> ctypes.CDLL:
    """The device. Torch asks only once, when it is imported, whether there is one."""
    assert "torch" not in sys.modules, "import pretend before torch"
    library = ctypes.CDLL(str(pretend_build.built().device), mode=ctypes.RTLD_GLOBAL)
    library.pretend_synchronize.restype = ctypes.c_char_p
    library.pretend_limit.argtypes = [ctypes.c_uint64]
    library.pretend_resize.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


_device = _open()

import torch  # noqa: E402

DEVICE = torch.device("cuda", 0)

# ---- for tests -------------------------------------------------------------------------------------------------------


def mode(name: str) -> None:
    """When the device works, see scheduler.h: eager, late, random, copies, compute or alone."""
    _device.pretend_mode(MODES.index(name))


def early(stream: Stream) -> None:
    """It works at once, in mode alone."""
    _device.pretend_early(stream.stream_id)


def seed(value: int) -> None:
    """Of mode random."""
    _device.pretend_seed(value)


def limit(nbytes: int) -> None:
    """How much memory the device has."""
    _device.pretend_limit(nbytes)


def reset_peak() -> None:
    """What is allocated now is the largest from here on."""
    _device.pretend_reset_peak()


def statistics() -> Statistics:
    """As of now: work that still waits has not freed what it will free."""
    out = Statistics()
    _device.pretend_read(ctypes.byref(out))
    return out


def settle() -> None:
    """Let the device do all that it has been given.

    Raises:
        RuntimeError: what failed there.
    """
    _synchronize(noted=False)


_called: list[Any] = []
"""Listeners so far: a thread that was about to call one when it was taken off must find its code."""


@contextlib.contextmanager
def on_wait(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener(reason)` in a thread that waits for the device, whenever one does."""
    callback = LISTENER(lambda reason: listener(reason.decode()))
    _called.append(callback)
    _device.pretend_listen(callback)
    try:
        yield
    finally:
        _device.pretend_listen(LISTENER())


# ---- torch.cuda ------------------------------------------------------------------------------------------------------


def _synchronize(*, noted: bool) -> None:
    error = _device.pretend_synchronize(int(noted))
    if error is not None:
        raise RuntimeError(error.decode())


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        if identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, device=DEVICE, priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device=DEVICE, enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


class DeviceGuard(contextlib.AbstractContextManager[None]):
    """torch.cuda.device: there is one."""

    def __init__(self, device: Any) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@dataclass(frozen=True)
class Properties:
    """What torch.cuda.get_device_properties says."""

    total_memory: int
    name: str = NAME
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = 132


def _stream(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=int(torch._C._autograd.DeviceType.CUDA))


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return _stream(torch._C._accelerator_getStream(0).stream_id)


def set_stream(stream: torch.Stream | None) -> None:
    """torch.cuda.set_stream."""
    if stream is not None:
        torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def use_stream(stream: torch.Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _memory_info(device: Any = None) -> tuple[int, int]:
    now = statistics()
    return now.limit_bytes - now.reserved_bytes, now.limit_bytes


def _memory_stats(device: Any = None) -> dict[str, int]:
    now = statistics()
    return {
        "num_device_alloc": now.segments,
        "allocated_bytes.all.current": now.allocated_bytes,
        "allocated_bytes.all.peak": now.peak_bytes,
        "reserved_bytes.all.current": now.reserved_bytes,
    }


_resize_on_host = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """UntypedStorage.resize_."""
    if storage.device != DEVICE:
        return _resize_on_host(storage, nbytes)
    _device.pretend_resize(storage._cdata, nbytes)
    return storage


def _ignored() -> Callable[..., None]:
    """A function of its own each time: torch's compiler tells them apart by what they are."""
    return lambda *arguments, **more: None


STREAMS = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _stream(0),
    "set_stream": set_stream,
    "stream": use_stream,
    "synchronize": lambda device=None: _synchronize(noted=True),
    "is_current_stream_capturing": lambda: False,
    "_sleep": _ignored(),  # a stream is late because of its mode
}
THE_DEVICE = {
    "device": DeviceGuard,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": _ignored(),
    "_lazy_init": _ignored(),
    "_is_in_bad_fork": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _ignored(),
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": lambda device=None: Properties(statistics().limit_bytes),
    "is_bf16_supported": lambda including_emulation=True: True,
    "can_device_access_peer": lambda device, peer: False,
}
MEMORY = {
    "empty_cache": lambda: _device.pretend_empty_cache(),
    "ipc_collect": _ignored(),
    "mem_get_info": _memory_info,
    "memory_stats": _memory_stats,
    "memory_allocated": lambda device=None: statistics().allocated_bytes,
    "max_memory_allocated": lambda device=None: statistics().peak_bytes,
    "memory_reserved": lambda device=None: statistics().reserved_bytes,
    "max_memory_reserved": lambda device=None: statistics().reserved_bytes,
    "reset_peak_memory_stats": lambda device=None: reset_peak(),
}
# The kernels are the CPU's, and so is the generator that they draw from.
RANDOM = {
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": _ignored(),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": _ignored(),
}


def _install() -> None:
    for name, value in {**STREAMS, **THE_DEVICE, **MEMORY, **RANDOM}.items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, RANDOM[name])
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
    torch.set_num_threads(1)  # how a reduction is split must not depend on which thread asks
    # The CPU's flash attention has no twin on this device: both take the same sum apart in the same way without it.
    torch.backends.cuda.enable_flash_sdp(False)


def _install_kernels() -> None:
    import native

    path = pretend_build.built().kernels
    ffi = native._ffi()
    opened = native.Native(ffi=ffi, lib=ffi.dlopen(str(path)), path=path)
    native.load_cuda = lambda: opened


_install()
_install_kernels()
mode(os.environ.get("PRETEND_MODE", "late"))
