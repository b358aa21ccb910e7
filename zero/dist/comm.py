"""The collectives of one engine: one order on all ranks, sums in rank order, errors instead of hangs.

[Note: agreed order] The thread that decides to gather or reduce something makes a `QueuedWork` at that moment. Ranks
that run the same program queue the same work. Its jobs become ready in any order, depending on disks and memory, but
they are launched in the order of the queue.

[Note: headers] If ranks launch different collectives, gloo ends the process when their messages differ in size, and
mixes values when the sizes are equal. So before each collective its ranks send each other their places in the order and
a hash of all entries up to there: a few bytes, while the previous collective moves its data. With NCCL no headers are
sent; there the watchdog and `all_gather_bytes` find a difference.
"""

from __future__ import annotations

import asyncio
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError, RankDivergenceError, RankLostError
from offload.files.archives import bytes_of, bytes_tensor
from offload.streams import MaybeEvent, Streams
from offload.timeline import Timeline, external_wait
from zero.dist import backend
from zero.dist.control_plane import ControlPlane
from zero.dist.failure_state import FailureState, copy_error
from zero.dist.process_groups import ProcessGroups, open_process_groups
from zero.dist.sequence import LaunchOrder, OperationLog, QueuedWork, pack_header
from zero.dist.watchdog import Wait, Watchdog

TIMEOUT_SECONDS = 1800.0  # torch's default.
GIVE_UP_SECONDS = 10.0  # Time for work in flight to end once its connections are shut.


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...]
    index: int  # Of this rank in `ranks`.
    handle: Any = field(default=None, repr=False, compare=False)  # Torch's process group; None for a group of one.

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(slots=True)
class TrafficCounts:
    """Totals of one kind of collectives on this rank: of flat tensors of full length, not of shards."""

    calls: int = 0
    numel: int = 0
    nbytes: int = 0


class Comm:
    """An engine's collectives on this rank.

    Args:
        device: where the tensors of collectives live.
        streams: of that device; closed with this.
        process_group: the participating ranks; None: torch's default group, or this process alone if there is none.
        deadline_seconds: after so long, a wait without evidence of a problem is logged as a warning.
        fixed_order: the caller makes the sums, in rank order, with NCCL too (with gloo: always).
        teams: global ranks of this group and of the other groups that all ranks make at the same time; empty: there is
            no other.

    Attributes:
        timeline: records collectives.
        timeout_seconds: the process group's. A rank may be slow so long; one that has failed is noticed in seconds.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        *,
        process_group: Any = None,
        deadline_seconds: float = 30.0,
        fixed_order: bool = False,
        teams: Sequence[Sequence[int]] = (),
    ) -> None:
        self.device = device
        self.streams, self.timeline = streams, Timeline()
        self._members = backend.ranks_of(process_group) if backend.is_initialized() else [0]
        self.world_size = len(self._members)
        self.rank = self._members.index(backend.own_rank()) if self.world_size > 1 else 0
        self._operation_log, self._launch_order, self._failure_state = OperationLog(), LaunchOrder(), FailureState()
        self._failure_state.add_listener(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: set[asyncio.Future[None]] = set()
        self._groups: dict[tuple[int, ...], Group] = {(self.rank,): Group((self.rank,), 0)}
        self.traffic: dict[str, TrafficCounts] = {}
        timeout = backend.timeout_of(process_group) if self.world_size > 1 else None
        self.timeout_seconds = TIMEOUT_SECONDS if timeout is None else timeout.total_seconds()
        self._nccl = self.world_size > 1 and backend.uses_nccl(device, process_group)
        self._backend_name = backend.backend_name(device) if self._nccl else "gloo"
        self.fixed_order = fixed_order or not self._nccl
        self._process_groups: ProcessGroups | None = None
        self._watchdog: Watchdog | None = None
        control = None
        if self.world_size > 1:
            self._process_groups, self._watchdog, control = open_process_groups(
                self._operation_log,
                self._failure_state,
                self._members,
                device,
                process_group,
                deadline_seconds,
                teams,
            )
        self._leave = weakref.finalize(
            self, _leave, os.getpid(), self._watchdog, self._process_groups, self._failure_state
        )
        self._control_plane = ControlPlane(
            self._members,
            self.rank,
            control,
            self._operation_log,
            self._failure_state,
            self._waiting_at,
            self._explain_blocking,
        )

    def group(self, ranks: Sequence[int]) -> Group:
        """This rank's group. All ranks call it together, each with its own group; groups do not overlap.

        `ranks`: in the order of their shards. If every rank is a group of one, nothing is sent.
        """
        key = tuple(ranks)
        if self.rank not in key or len(set(key)) != len(key) or not set(key) <= set(range(self.world_size)):
            raise ConfigError(
                f"group: expected distinct ranks below {self.world_size} that include {self.rank}, got {key}"
            )
        if key not in self._groups:
            answers = self.all_gather_bytes("groups", struct.pack(f"<{len(key)}q", *key))
            groups = [struct.unpack(f"<{len(answer) // 8}q", answer) for answer in answers]
            for member in key:
                if groups[member] != key:
                    raise ConfigError(
                        f"group: the ranks ask for different groups: rank {self.rank} for {key}, rank {member} "
                        f"for {groups[member]}"
                    )
            self._groups[key] = self.group_from_list(sorted(set(groups)))
        return self._groups[key]

    def group_from_list(self, groups: Sequence[Sequence[int]]) -> Group:
        """This rank's group in a list that is equal on all ranks; a group of one if it is in none. No overlaps."""
        own = Group((self.rank,), 0)
        for ranks in map(tuple, groups):
            handle = self._open_group(ranks)
            if self.rank in ranks:
                own = Group(ranks, ranks.index(self.rank), handle)
        return own

    def _open_group(self, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == 1 or self._process_groups is None:
            return None
        what = f"opening the group of ranks {ranks}"
        with self._waiting_at(self._operation_log.count - 1, what):
            try:
                return self._process_groups.new_group([self._members[rank] for rank in ranks], self._backend_name)
            except BaseException as error:
                raise self._explain_blocking(error, what) from error

    # ---- on the I/O loop ----------------------------------------------------------------------

    def enqueue(self, kind: str, unit: int, name: str) -> QueuedWork:
        """The next place in the agreed order, for the deciding thread: all ranks make the same calls in the same order.

        Args:
            kind: for example "gather" or "reduce".
            unit: index of the unit; -1: none.
            name: of the unit's module, for messages.
        """
        self._failure_state.raise_if_failed()
        return self._operation_log.add_queued(kind, unit, name)

    async def all_gather(self, queued: QueuedWork, flat: Tensor, group: Group, *after: MaybeEvent) -> MaybeEvent:
        """Fill `flat` with every rank's shard.

        Returns an event that is complete after the gather. Raises RankDivergenceError: the ranks do not do the same;
        this and every later call raise it.

        Args:
            flat: (size * N,), contiguous; shard `group.index` of N elements is valid on entry, all are on exit.
            after: events after which `flat` may be read and written.
        """
        if group.size == 1:
            return self._finish_alone(queued, after)
        own = self._split(queued, flat, group)[group.index]
        start = partial(backend.all_gather_shards, backend.as_bytes(flat), backend.as_bytes(own), group.handle)
        return await self._run_collective(queued, group, flat, after, start)

    async def reduce_scatter(
        self, queued: QueuedWork, flat: Tensor, group: Group, *after: MaybeEvent, into: Tensor | None = None
    ) -> list[Tensor]:
        """The summands of this rank's shard of the sum over the group; the caller adds them in this order.

        Returns tensors of (N,): one for each rank, in rank order, or a single one if the backend may add (`fixed_order`
        False). They are ready for the current stream of the I/O loop.

        Args:
            flat: (size * N,), contiguous; it is not changed.
            after: events after which `flat` may be read, and `into` written.
            into: (size * N,) of the same dtype to receive into; None allocates. With `fixed_order` False: its first N.
        """
        if group.size == 1:
            self.streams.wait_events(self._finish_alone(queued, after))
            return [flat]
        numel = self._split(queued, flat, group)[0].numel()
        arrived = into if into is not None else flat.new_empty(flat.numel() if self.fixed_order else numel)
        if not self.fixed_order:
            arrived = arrived[:numel]
            begin = partial(backend.reduce_scatter, arrived, flat, group.handle)
        else:
            begin = partial(backend.all_to_all, backend.as_bytes(arrived), backend.as_bytes(flat), group.handle)
        self.streams.wait_events(
            await self._run_collective(queued, group, flat, (*after, self.streams.record_event()), lambda: [begin()])
        )
        return list(backend.split_flat(arrived, numel))

    def raise_if_failed(self) -> None:
        """Raise if the ranks no longer work together, or the engine is closed."""
        self._failure_state.raise_if_failed()

    def ended_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that have ended or closed their engine -> what is known about it. Any thread."""
        return {} if self._watchdog is None else self._watchdog.ended_ranks(ranks)

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """A context in which this rank waits for others by other means, such as shared memory.

        Inside, if a rank fails or leaves, `raise_if_failed` raises on all ranks, so call it while waiting.
        """
        return self._waiting_at(self._operation_log.count, what)

    @contextmanager
    def failing_together(self, kind: str) -> Iterator[None]:
        """A context in which ranks send messages of their own, in parts of this group: a failure on one ends all.

        A RankLostError raised inside means that such a message failed: the error that leaves the context names the
        cause.
        Raises RankDivergenceError: another rank has failed, also in an earlier call.

        `kind`: the same words on every rank.
        """
        queued = self.enqueue(kind, -1, "all stages")
        try:
            with self._waiting_at(queued.place, str(queued)):
                yield
        except RankLostError as error:  # the rank that caused it is not known yet
            raise self._explain_blocking(RuntimeError(str(error)), str(queued)) from error
        except BaseException as error:
            self._fail_work(error, queued)
            raise
        finally:
            self._launch_order.advance_past(queued.number)

    def fail(self, error: BaseException) -> None:
        """Ranks outside this group no longer work together with it: end the waits in this group too. Any thread."""
        self._failure_state.fail(copy_error(error))

    def fail_with(self, other: Comm) -> None:
        """An error that ends `other` ends this too."""
        other._failure_state.add_listener(self._failure_state)

    def cancel(self, queued: QueuedWork, error: BaseException) -> None:
        """This rank cannot take part in `queued`: report the reason to the ranks that wait for it. Any thread."""
        self._fail_work(error, queued)

    def _finish_alone(self, queued: QueuedWork, after: tuple[MaybeEvent, ...]) -> MaybeEvent:
        self._launch_order.advance_past(queued.number)
        events = [event for event in after if event is not None]
        if len(events) < 2:
            return events[0] if events else None
        self.streams.wait_events(*events)
        return self.streams.record_event()

    def _split(self, queued: QueuedWork, flat: Tensor, group: Group) -> tuple[Tensor, ...]:
        if flat.dim() != 1 or not flat.is_contiguous() or flat.numel() % group.size:
            raise ConfigError(
                f"{queued}: expected a contiguous flat tensor of {group.size} equal shards, got shape "
                f"{tuple(flat.shape)}, strides {flat.stride()}"
            )
        return backend.split_flat(flat, flat.numel() // group.size)

    async def _run_collective(
        self,
        queued: QueuedWork,
        group: Group,
        flat: Tensor,
        after: tuple[MaybeEvent, ...],
        start: Callable[[], list[Any]],
    ) -> MaybeEvent:
        """Launch all works of `start` when `queued` is next, and wait. Returns an event after them."""
        self._loop = asyncio.get_running_loop()
        failure = self._failure_state.failure
        if failure is not None:  # it came before this loop ran, so `on_failure` could not stop the order
            self._launch_order.fail(failure)
        try:
            if not self._nccl:
                await self.streams.synchronize(*after)
            await self._launch_order.wait_until_next(queued.number)
            self._failure_state.raise_if_failed()
            with self._waiting_at(queued.place, str(queued)) as wait:
                if not self._nccl:
                    await self._compare_headers(queued, group)
                with self.streams.collective_stream(*after):
                    works = start()
                self._launch_order.advance_past(queued.number)
                self._count_traffic(queued.kind, flat)
                if not self._nccl:
                    with self.timeline.span("collectives", str(queued), flat.nbytes):
                        await self._wait_for_works(works, str(queued))
                with self.streams.collective_stream():
                    for work in works:
                        work.wait()  # with NCCL the current stream waits, not this thread
                    event = self.streams.record_event()
                if self._nccl:
                    wait.event = event
                return event
        except BaseException as error:
            self._fail_work(error, queued)
            raise

    async def _compare_headers(self, queued: QueuedWork, group: Group) -> None:
        """Return if the group's ranks are about to launch the same collective; else raise."""
        own = pack_header(queued.place, queued.digest)
        headers = torch.empty(group.size * len(own), dtype=torch.uint8, device="cpu")
        own_part = headers[group.index * len(own) : (group.index + 1) * len(own)]
        own_part.copy_(bytes_tensor(own))
        await self._wait_for_works([backend.all_gather(headers, own_part, group.handle)], str(queued))
        if bytes_of(headers) != own * group.size:
            error = RankDivergenceError("the ranks have run different operations so far")
            raise await self.explain(error, str(queued))

    async def _wait_for_works(self, works: list[Any], what: str) -> None:
        futures = [backend.as_future(work) for work in works]
        self._in_flight.update(futures)
        try:
            await asyncio.gather(*futures)
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise await self.explain(error, what) from error
        finally:
            self._in_flight.difference_update(futures)

    def _count_traffic(self, kind: str, flat: Tensor) -> None:
        counts = self.traffic.setdefault(kind, TrafficCounts())
        counts.calls += 1
        counts.numel += flat.numel()
        counts.nbytes += flat.nbytes

    # ---- blocking calls -----------------------------------------------------------------------

    def all_gather_bytes(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Every rank's payload, in rank order. Blocks; any thread but the I/O loop's; all ranks call it together.

        Raises RankDivergenceError: the decisions of the ranks up to here differ.

        `what`: the same words on every rank; `payload`: any bytes, up to a few hundred at the price of one message.
        """
        return self._control_plane.all_gather_bytes(what, payload)

    def broadcast(self, tensors: Sequence[Tensor], source_rank: int) -> None:
        """Copy the values of tensors from `source_rank` to every rank, in few messages. Blocks.

        `tensors`: of any device, dtype and shape, which must be equal on all ranks.
        """
        self._control_plane.broadcast(tensors, source_rank)

    @contextmanager
    def _waiting_at(self, place: int, what: str) -> Iterator[Any]:
        waiting = nullcontext(Wait(place, what, 0.0)) if self._watchdog is None else self._watchdog.waiting(place, what)
        with external_wait(), waiting as wait:
            yield wait

    def _explain_blocking(self, error: BaseException, what: str) -> BaseException:
        """The error to raise instead of `error`. Blocks until the watchdog has read the other ranks' positions."""
        if self._failure_state.failure is None and self._watchdog is not None:
            self._watchdog.find_cause(error, what).result()
        return copy_error(self._failure_state.fail(error))

    async def explain(self, error: BaseException, what: str) -> BaseException:
        """The error to raise instead of `error`, which ended `what`; on the I/O loop."""
        if self._failure_state.failure is None and self._watchdog is not None:
            await asyncio.wrap_future(self._watchdog.find_cause(error, what))
        return copy_error(self._failure_state.fail(error))

    def _fail_work(self, error: BaseException, queued: QueuedWork) -> None:
        if not isinstance(error, RankDivergenceError):
            error = RankDivergenceError(
                f"rank {self.rank} could not take part in {queued}: {type(error).__name__}: {error}"
            )
        self._failure_state.fail(error)

    def on_failure(self, error: BaseException) -> None:
        """The ranks no longer work together: notify the other threads."""
        if self._watchdog is not None:
            self._watchdog.wake()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_queued, error)

    def _fail_queued(self, error: BaseException) -> None:
        self._launch_order.fail(error)
        # The connections are shut, so work in flight ends and no longer uses its memory. If it does not end, its waits
        # are abandoned.
        asyncio.get_running_loop().call_later(GIVE_UP_SECONDS, self._fail_in_flight, error)

    def _fail_in_flight(self, error: BaseException) -> None:
        for future in self._in_flight:
            if not future.done():
                future.set_exception(RuntimeError(str(error)))

    def close(self, error: BaseException | None = None) -> None:
        """Leave, and destroy the groups. Publishes this for ranks that wait for this one, with the `error` if any.

        Idempotent.
        """
        if error is not None:
            self._failure_state.fail(RankLostError(f"rank {self.rank} has failed: {type(error).__name__}: {error}"))
        self._leave()
        self._groups.clear()
        self.streams.close()


def _leave(
    pid: int, watchdog: Watchdog | None, process_groups: ProcessGroups | None, failure_state: FailureState
) -> None:
    """Runs when an engine is closed or dropped, or when its process ends."""
    if os.getpid() != pid:
        return  # a forked child, such as a data loader's worker: it must not touch its parent's groups
    failure_state.is_closed = True
    if watchdog is not None and process_groups is not None:
        watchdog.stop()
        if watchdog.is_waiting:
            process_groups.abort()
            # The process may be about to end: gloo's threads must not outlive Python.
            watchdog.wait_until_idle(GIVE_UP_SECONDS)
        process_groups.close()
