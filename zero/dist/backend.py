"""torch.distributed under one set of names: the only module that knows the names of its versions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from offload.accelerator import KINDS, kind_of, set_device
from offload.system.interrupts import deferring_interrupts

Handle: TypeAlias = Any  # A torch process group.
Work: TypeAlias = Any  # A collective in flight.
# Shards of at least this size are gathered by broadcasts with gloo. Its gather makes a copy of all shards: from this
# size on that takes longer, up to three times, and C's allocator keeps a part of the copy's memory.
BROADCAST_BYTES_MIN = 256 << 10
POLL_SECONDS = 0.25  # A waiting rank checks so often that the ranks still work together.

_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def is_initialized() -> bool:
    """True when torch's default group exists."""
    return dist.is_available() and dist.is_initialized()


def ranks_of(group: Handle | None) -> list[int]:
    """Global ranks of a group; None is the default group."""
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def own_rank() -> int:
    return int(dist.get_rank())


def uses_nccl(device: torch.device, group: Handle | None) -> bool:
    """True when collectives on `device` run on a stream: those of NCCL, or of the equivalent library of its kind."""
    kind = kind_of(device)
    return (
        kind is not None and kind.has_collectives() and kind.collective_backend in str(dist.get_backend_config(group))
    )


def backend_name(device: torch.device) -> str:
    """The backend whose collectives run on a stream of the device: NCCL, or the equivalent library of its kind."""
    return KINDS[device.type].collective_backend


def new_default_group(ranks: Sequence[int]) -> Handle:
    """A process group of global ranks with the default group's backend; every rank calls this in the same order."""
    return dist.new_group(list(ranks))


def new_group(
    ranks: Sequence[int],
    name: str,
    parent: Handle | None,
    timeout: timedelta | None,
    device: torch.device,
    check: Callable[[], None],
) -> Handle:
    """A process group of global ranks; every rank of the default group calls this in the same order.

    Torch cannot be interrupted before the timeout, so a separate thread makes the group. Meanwhile `check` is called
    regularly and may raise; then the thread is abandoned and ends at some later time.

    Args:
        name: of its backend.
        parent: the group from which it takes its timeout; None: the default group.
        timeout: used instead while the group is made.
        device: the calling thread's.
    """
    group_future: Future[Handle] = Future()

    def make() -> None:
        try:
            set_device(device)
            group_future.set_result(dist.new_group(list(ranks), backend=name, timeout=timeout or timeout_of(parent)))
        except BaseException as error:
            group_future.set_exception(error)

    threading.Thread(target=make, name="zero-group", daemon=True).start()
    while not wait([group_future], timeout=POLL_SECONDS).done:
        check()
    return group_future.result()


def inherit_timeout(handle: Handle, parent: Handle | None) -> None:
    timeout = timeout_of(parent)
    if timeout is not None:
        handle._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def timeout_of(group: Handle | None) -> timedelta | None:
    """The group's timeout; None: torch's default."""
    handle: Any = group if group is not None else dist.group.WORLD
    for device in ("cpu", *KINDS):
        with contextlib.suppress(Exception):
            timeout: timedelta = handle._get_backend(torch.device(device)).options._timeout
            return timeout
    return None


def has_cpu_backend(group: Handle | None) -> bool:
    """True when the group's collectives work on host tensors."""
    handle: Any = group if group is not None else dist.group.WORLD
    try:
        handle._get_backend(torch.device("cpu"))
    except Exception:
        return False
    return True


def with_prefix(store: Any, prefix: str) -> Any:
    """The store with a prefix for all keys."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(prefix, store)


def clone_store(store: Any, seconds: float) -> Any:
    """The store through a separate connection, so that a thread that waits for a key does not block others.

    `store`: any; one that cannot be cloned is returned unchanged. `seconds`: timeout of the connection.
    """
    if not hasattr(store, "clone"):
        return store
    before = store.timeout
    try:
        store.set_timeout(min(before, timedelta(seconds=seconds)))
        return store.clone()
    finally:
        store.set_timeout(before)


def abort(handle: Handle, device: torch.device) -> None:
    """Abort NCCL's collectives in flight; gloo has no abort."""
    with contextlib.suppress(Exception):
        if uses_nccl(device, handle):
            handle._get_backend(device).abort()


def destroy_group(handle: Handle) -> None:
    """Destroy a group, if torch still has it."""
    with contextlib.suppress(Exception):
        dist.destroy_process_group(handle)


def store_of(group: Handle | None) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._get_default_store() if group is None else c10d._get_process_group_store(group)


def all_gather(gathered: Tensor, own: Tensor, handle: Handle) -> Work:
    """Launch an all-gather; `own` may be a part of `gathered`."""
    return _all_gather(gathered, own, group=handle, async_op=True)


def all_gather_shards(gathered: Tensor, own: Tensor, handle: Handle) -> list[Work]:
    """Like `all_gather`, where `own` is this rank's shard of `gathered`; the caller waits for all the returned work."""
    if own.device.type != "cpu" or own.nbytes < BROADCAST_BYTES_MIN:
        return [all_gather(gathered, own, handle)]
    return [
        broadcast(shard, rank, handle)
        for shard, rank in zip(split_flat(gathered, own.numel()), ranks_of(handle), strict=True)
    ]


def reduce_scatter(own: Tensor, flat: Tensor, handle: Handle) -> Work:
    """Launch a reduce-scatter that sums."""
    return _reduce_scatter(own, flat, group=handle, async_op=True)


def all_to_all(received: Tensor, sent: Tensor, handle: Handle) -> Work:
    """Launch an all-to-all: part r of `sent` is sent to rank r, part r of `received` is received from it."""
    return dist.all_to_all_single(received, sent, group=handle, async_op=True)


def broadcast(tensor: Tensor, source: int, handle: Handle) -> Work:
    """Launch a broadcast; `source` is a global rank."""
    return dist.broadcast(tensor, source, group=handle, async_op=True)


def add_done_callback(work: Work, callback: Callable[[], None]) -> None:
    """Call `callback` once, from any thread, when the work has ended or failed."""

    def on_future_done(future: Any) -> None:
        callback()

    work.get_future().add_done_callback(on_future_done)


def as_future(work: Work) -> asyncio.Future[None]:
    """A future of the running loop that is done when the work has ended on the host or failed."""
    loop = asyncio.get_running_loop()
    work_future: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not work_future.done():
            work_future.set_result(None)

    def on_work_done() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: no task waits
            loop.call_soon_threadsafe(finish)

    add_done_callback(work, on_work_done)
    return work_future


def wait_for_work(work: Work, check: Callable[[], None]) -> None:
    """Block until the work has ended on the host; `check` is called regularly and may raise."""
    done = threading.Event()
    add_done_callback(work, done.set)
    while not done.wait(POLL_SECONDS):
        deferring_interrupts.deliver_overdue()
        check()
    work.wait()


def split_flat(flat: Tensor, numel: int) -> tuple[Tensor, ...]:
    """Views of `numel` elements each; the last one may be shorter."""
    parts: tuple[Tensor, ...] = torch.split(flat, numel)
    return parts


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as (nbytes,) uint8: to move bytes, the backend need not know the dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
