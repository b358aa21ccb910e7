"""torch.distributed between processes that have a pretend GPU each.

`join` makes the default group, in one of three ways. "streams": what lies on the device goes as NCCL has it. A call
returns at once, its work runs in order on a stream of the group, behind what the caller's current stream had been
given, and `wait` makes the current stream wait, not the host. "gloo": what lies on the device is staged through the
host, as torch's gloo does for CUDA. "over_host": as "streams", and weights are gathered from host memory of all ranks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pretend  # before torch
import torch
import torch.distributed as dist
from torch import Tensor

from offload import accelerator

NAME = "pretend"
WAYS = {"streams": f"cpu:gloo,cuda:{NAME}", "gloo": "gloo", "over_host": f"cpu:gloo,cuda:{NAME}"}
COLLECTIVES = ("all_gather", "reduce_scatter", "exchange", "all_reduce", "broadcast")
NUMBERS = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)
TIMEOUT = timedelta(seconds=60)

_numbers = itertools.count()
_device = pretend._device
_device.pretend_wire.restype = ctypes.c_void_p
_device.pretend_wire.argtypes = [ctypes.c_char_p, *[ctypes.c_int] * 3]
_device.pretend_launch_collective.argtypes = [
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
]
_device.pretend_abort.argtypes = _device.pretend_close.argtypes = [ctypes.c_void_p]


class StreamWork:
    """A collective on the group's stream. The tensors are kept until somebody has waited."""

    def __init__(self, stream: pretend.Stream, tensors: tuple[Tensor, ...]) -> None:
        self._done, self._tensors = stream.record_event(), tensors

    def wait(self, timeout: Any = None) -> bool:
        """Of the current stream."""
        pretend.current_stream().wait_event(self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._done.query()


class PretendGroup(dist.ProcessGroup):
    """A group whose collectives run on a stream. The default group has gloo beside it, for what lies on the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, folder: Path) -> None:
        super().__init__(rank, size)
        if rank == 0:
            store.set("wire", str(folder / f"wire-{os.getpid()}-{next(_numbers)}"))
        self._stream = pretend.Stream()
        path = store.get("wire")
        self._wire = _device.pretend_wire(path, rank, size, self._stream.stream_id)
        self._host = None if dist.is_initialized() else _gloo(store, rank, size)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        pass

    def _set_group_desc(self, text: str) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self
        if self._host is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._host._get_backend(device)

    def shutdown(self) -> None:
        _device.pretend_close(self._wire)
        if self._host is not None:
            self._host.shutdown()

    def abort(self) -> None:
        _device.pretend_abort(self._wire)

    # ---- collectives; on the host they are gloo's

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any) -> Any:
        if not output.is_cuda:
            return self._host.all_gather_single(output, given, options)
        return self._launch("all_gather", output, given)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> Any:
        if not output.is_cuda:
            return self._host.reduce_scatter_single(output, given, options)
        return self._launch("reduce_scatter", output, given)

    def all_to_all_single(self, output: Tensor, given: Tensor, out: list[int], into: list[int], options: Any) -> Any:
        if not output.is_cuda:
            return self._host.all_to_all_single(output, given, out, into, options)
        return self._launch("exchange", output, given)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if not tensors[0].is_cuda:
            return self._host.allreduce(tensors, options)
        return self._launch("all_reduce", tensors[0], tensors[0])

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if not tensors[0].is_cuda:
            return self._host.broadcast(tensors, options)
        return self._launch("broadcast", tensors[0], tensors[0], options.rootRank)

    def _launch(self, what: str, output: Tensor, given: Tensor, root: int = 0) -> StreamWork:
        assert output.is_contiguous() and given.is_contiguous() and output.dtype == given.dtype
        self._stream.wait_stream(pretend.current_stream())
        _device.pretend_launch_collective(
            *(self._wire, COLLECTIVES.index(what), NUMBERS.index(given.dtype)),
            *(output.data_ptr(), given.data_ptr(), given.nbytes, root),
        )
        return StreamWork(self._stream, (output, given))


def _gloo(store: Any, rank: int, size: int) -> Any:
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=TIMEOUT)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class StagedWork:
    """A collective of gloo on copies in host memory."""

    def __init__(self, work: Any, output: Tensor, arrived: Tensor) -> None:
        self._work, self._output, self._arrived = work, output, arrived

    def get_future(self) -> Any:
        return self._work.get_future()

    def wait(self) -> bool:
        """The current stream copies what has come to the device."""
        self._work.wait()
        self._output.copy_(self._arrived, non_blocking=True)
        return True


def _staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's gloo does it where torch is built for CUDA: what is sent is copied behind the current stream."""

    def run(output: Tensor, given: Tensor, *, group: Any = None, async_op: bool = False) -> Any:
        if not output.is_cuda:
            return collective(output, given, group=group, async_op=async_op)
        arrived = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        assert async_op
        return StagedWork(collective(arrived, given.cpu(), group=group, async_op=True), output, arrived)

    return run


def join(way: str, folder: Path) -> None:
    """Make the default group of the ranks that share `folder`; RANK and WORLD_SIZE say which this is."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if way != "gloo":

        def make(store: Any, rank: int, size: int, timeout: timedelta) -> PretendGroup:
            return PretendGroup(store, rank, size, timeout, folder)

        dist.Backend.register_backend(NAME, make, devices=["cuda"])
        accelerator.KINDS["cuda"] = dataclasses.replace(accelerator.KINDS["cuda"], collective_backend=NAME)
    else:
        import zero.dist.backend as backend

        backend._all_gather, dist.all_to_all_single = _staged(backend._all_gather), _staged(dist.all_to_all_single)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(WAYS[way], store=store, rank=rank, world_size=size, timeout=TIMEOUT)
