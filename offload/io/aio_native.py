"""The native I/O engine for asyncio: its event descriptor wakes the loop, and tags identify the futures."""

from __future__ import annotations

import asyncio
import errno as errno_names
import itertools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import native
from offload.errors import NativeError, StateError
from offload.io.aio_base import NATIVE_BACKENDS, OPS, Aio, AioFault, AioOptions, AioStats, Request, shield_until_done

COMPLETIONS_PER_CALL = 64
RATE_ONE = 1 << 16
IO_URING_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


def why_unavailable(library: native.Native, backend: str, status: int) -> str:
    """Explains the `status` of a failed attempt to use `backend`, and how to fix it."""
    name = errno_names.errorcode.get(-status, str(status))
    text = f"{name}: {_error_text(library, status)}"
    if backend == "io_uring" and -status in (errno_names.EPERM, errno_names.EACCES):
        setting = IO_URING_SYSCTL.read_text().strip() if IO_URING_SYSCTL.exists() else "absent"
        return f"blocked ({text}; by seccomp or by sysctl kernel.io_uring_disabled, which is {setting}; 0 allows it)"
    hint = {
        ("io_uring", errno_names.ENOSYS): "; needs Linux 5.6 and its headers at build time",
        ("io_uring", errno_names.ENOMEM): "; raise RLIMIT_MEMLOCK (ulimit -l) or lower aio.queue_depth",
        ("libaio", errno_names.EAGAIN): "; raise sysctl fs.aio-max-nr or lower aio.queue_depth",
    }.get((backend, -status), "")
    return f"unavailable ({text}{hint})"


def why_not_registered(library: native.Native, status: int) -> str:
    """One line for `reason`; empty when the backend cannot register memory at all."""
    if status == -errno_names.ENOTSUP:
        return ""
    name = errno_names.errorcode.get(-status, str(status))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    hint = {
        errno_names.ENOMEM: f"; RLIMIT_MEMLOCK is {soft:,} bytes, raise it with ulimit -l",
        errno_names.EPERM: "; RLIMIT_MEMLOCK is 0, raise it with ulimit -l",
    }.get(-status, "")
    return f"buffers are not registered ({name}: {_error_text(library, status)}{hint})"


def open_native(library: native.Native, backend: str, options: AioOptions) -> NativeAio | str:
    """An engine on `backend`, or the reason why there is none."""
    number = NATIVE_BACKENDS.index(backend)
    status = library.lib.zn_aio_probe(number)
    if status != 0:
        return why_unavailable(library, backend, status)
    fields = {
        "backend": number,
        "queue_depth": options.queue_depth,
        "threads": options.threads,
        "requests_max": options.requests_max,
        "flags": (library.lib.ZN_AIO_SINGLE_SUBMIT if options.single_submit else 0)
        | (0 if options.overlap_events else library.lib.ZN_AIO_IN_WAVES),
        "chunk_bytes": options.chunk_bytes,
    }
    out = library.ffi.new("zn_aio **")
    status = library.lib.zn_aio_open(out, library.ffi.new("zn_aio_options *", fields))
    if status != 0:
        return why_unavailable(library, backend, status)
    return NativeAio(library, out[0], backend, options)


def _error_text(library: native.Native, status: int) -> str:
    return str(library.ffi.string(library.lib.zn_strerror(status)).decode())


class NativeAio(Aio):
    """An engine of `open_native`. It is bound to one event loop at a time: the one that used it last."""

    def __init__(self, library: native.Native, handle: Any, backend: str, options: AioOptions) -> None:
        super().__init__()
        self.backend, self.reason = backend, ""
        self._ffi, self._lib, self._library = library.ffi, library.lib, library
        self._handle = handle
        self._event_fd: int = self._lib.zn_aio_event_fd(handle)
        self._requests_max = options.requests_max
        self._completions = self._ffi.new("zn_aio_completion[]", COMPLETIONS_PER_CALL)
        self._tags = itertools.count()
        self._futures: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._request_slots = asyncio.Semaphore(self._requests_max)
        self._registered: dict[int, torch.Tensor] = {}

    def stats(self) -> AioStats:
        if self._closed:
            raise StateError("statistics: the I/O engine is closed")
        out = self._ffi.new("zn_aio_stats *")
        self._check("zn_aio_stats_get", self._lib.zn_aio_stats_get(self._handle, out))
        return AioStats(
            read_bytes=out.read_bytes,
            write_bytes=out.write_bytes,
            requests=out.requests,
            chunks=out.chunks,
            resumed=out.resumed,
            retried=out.retried,
            registered=out.registered,
            busy_seconds=out.busy_ns * 1e-9,
            read_seconds=out.read_ns * 1e-9,
            write_seconds=out.write_ns * 1e-9,
        )

    def inject(self, fault: AioFault | None) -> None:
        if self._closed:
            raise StateError("fault injection: the I/O engine is closed")
        plan = self._ffi.NULL
        if fault is not None:
            fields = {
                "seed": fault.seed,
                "status": -fault.errno,
                "fail_rate": round(fault.fail_rate * RATE_ONE),
                "short_rate": round(fault.short_rate * RATE_ONE),
                "delay_rate": round(fault.delay_rate * RATE_ONE),
                "delay_us": round(min(fault.delay_seconds * 1e6, self._lib.ZN_FAULT_HELD)),
                "op_mask": sum(1 << OPS.index(op) for op in set(fault.ops)),
                "skip": fault.skip,
                "count_max": fault.count_max,
                "begin": fault.begin,
                "end": fault.end,
            }
            plan = self._ffi.new("zn_aio_fault *", fields)
        self._check("zn_aio_inject", self._lib.zn_aio_inject(self._handle, plan))

    def register_memory(self, memory: torch.Tensor) -> Callable[[], None]:
        if self._closed or memory.numel() == 0:
            return lambda: None
        pointer, nbytes = self._ffi.cast("void *", memory.data_ptr()), memory.numel() * memory.element_size()
        status = self._lib.zn_aio_register_memory(self._handle, pointer, nbytes)
        if status != 0:
            self._add_reason(why_not_registered(self._library, status))
            return lambda: None
        # Kept alive: the kernel would take another mapping at the same address for this memory.
        key = next(self._tags)
        self._registered[key] = memory

        def undo() -> None:
            if not self._closed and self._lib.zn_aio_unregister_memory(self._handle, pointer, nbytes) == 0:
                self._registered.pop(key, None)

        return undo

    def _add_reason(self, note: str) -> None:
        if note not in self.reason:
            self.reason = "; ".join(filter(None, (self.reason, note)))

    def close(self) -> None:
        """As `Aio.close`; first takes completions that went unnoticed because the event loop had ended."""
        if not self._closed:
            self._poll_completions()
        super().close()

    async def _transfer_request(self, request: Request) -> None:
        self._bind(asyncio.get_running_loop())
        async with self._request_slots:
            status, fail_offset = await shield_until_done(self._submit(request))
        if status != 0:
            raise request.error(-status, fail_offset)

    def _submit(self, request: Request) -> asyncio.Future[tuple[int, int]]:
        tag = next(self._tags)
        fields = {
            "tag": tag,
            "op": OPS.index(request.op),
            "fd": request.fd,
            "offset": request.offset,
            "nbytes": request.nbytes,
            "buffer": self._ffi.cast("void *", 0 if request.buffer is None else request.buffer.data_ptr()),
        }
        future: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        # Noted before the submission: the completion may arrive before `zn_aio_submit` returns.
        self._pending[tag], self._futures[tag] = request, future
        status = self._lib.zn_aio_submit(self._handle, self._ffi.new("zn_aio_request *", fields), 1)
        if status != 0:
            del self._pending[tag], self._futures[tag]
            if status == -errno_names.EINVAL:
                raise request.error(errno_names.EINVAL, request.offset)
            self._check(f"submitting {request}", status)
        return future

    def _poll_completions(self) -> None:
        """Hand completions to their futures; the loop calls it when the event descriptor is readable."""
        count = COMPLETIONS_PER_CALL
        while count == COMPLETIONS_PER_CALL:
            count = self._lib.zn_aio_poll(self._handle, self._completions, COMPLETIONS_PER_CALL)
            for completion in self._completions[0:count]:
                self._pending.pop(completion.tag)
                future = self._futures.pop(completion.tag)
                if not future.done() and not future.get_loop().is_closed():
                    future.set_result((completion.status, completion.fail_offset))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            return
        if self._pending:
            raise StateError(f"{self.backend} is in use by another event loop: {'; '.join(self.in_flight())}")
        self._unbind()
        loop.add_reader(self._event_fd, self._poll_completions)
        self._loop, self._request_slots = loop, asyncio.Semaphore(self._requests_max)

    def _unbind(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._event_fd)
        self._loop = None

    def _close_backend(self) -> None:
        self._unbind()
        self._check("zn_aio_close", self._lib.zn_aio_close(self._handle))
        self._registered.clear()

    def _check(self, what: str, status: int) -> None:
        if status != 0:
            name = errno_names.errorcode.get(-status, str(status))
            raise NativeError(f"{what}: unexpected status {status} ({name}: {_error_text(self._library, status)})")
