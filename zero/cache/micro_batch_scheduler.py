"""Micro-batches side by side: one of them computes at a time, and at each unit the next one runs.

[Note: vertical order] Each micro-batch runs in a thread of its own, because autograd and a model's forward keep their
open calls on the stack. A micro-batch that is about to begin a unit that nobody uses hands over to the next one. So all
micro-batches pass one unit before the first begins the next: its weights are fetched once, and its gradients are added
up in the order of the micro-batches, as if these ran one after the other. A round is over when the first micro-batch is
about to continue; units that the round has fetched are pinned until then. A backward begins as soon as its forward is
over, so tensors that a loss needs (mainly logits) exist for one micro-batch at a time. Paths through the model may
differ between micro-batches: then units are fetched again, and gradients may be added up in another order. The same is
true for a module whose uses are recomputed one by one (`use_reentrant=True`).

[Note: random numbers] A recomputation must draw the same numbers as its forward, so each micro-batch has its own
generator states: the first continues with the process's, which have its state in the end; the others are seeded from
them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from offload.accelerator import HOST, is_accelerator, module_of, rng_state, set_rng_state
from offload.errors import StateError
from offload.system.interrupts import DEFER_SECONDS_MAX, deferring_interrupts

T = TypeVar("T")
LEFTOVER_ERROR = "train_batch: an interrupt left unfinished micro-batches behind; close the engine"
PinKey = tuple[str, int]
"""(why a unit is pinned, its index)."""


class _Stopped(BaseException):
    """Another micro-batch has failed, or the thread that waits for all was interrupted."""


@dataclass(slots=True)
class OpenCall:
    """A module call between its pre-forward and its post-forward."""

    module: nn.Module
    recompute: bool
    units: list[int] = field(default_factory=list)  # Units that the call uses, borrowed ones included.
    forward_ns: int = 0  # The time when its units were there; `backward_ns`: the same for its backward.
    backward_ns: int = 0
    forward_uses: list[int] = field(default_factory=list)  # Forward uses that end with the call.
    sentinel: torch.Tensor | None = None
    # Inputs, their version counters and grad_fns, to see which the call modifies in place.
    versions: list[tuple[torch.Tensor, int, Any]] = field(default_factory=list)

    def drop_graph(self) -> None:
        """Drop the references to the graph: its nodes refer to this object, and nothing would free that cycle."""
        self.sentinel = None
        self.versions = []


@dataclass(slots=True)
class OpenCalls:
    """The open calls of one forward; empty if none runs.

    Attributes:
        calls: innermost last.
        operation: an operation that reads units that no open call uses.
        root_depth: open calls of the root module.
    """

    calls: list[OpenCall] = field(default_factory=list)
    operation: OpenCall | None = None
    root_depth: int = 0
    backward_follows: bool = True

    def clear(self) -> None:
        """Drop all open calls: they were interrupted."""
        for call in self.calls:
            call.drop_graph()
        self.calls.clear()


@dataclass(slots=True, eq=False)
class MicroBatchTask(Generic[T]):
    """One micro-batch.

    Attributes:
        open_calls: the open calls of its forward.
        pinned_rows: ids of `ExpertRows` that its backward has in memory that the others need too; until gradients have
            passed them it does not yield.
        rng_states: states of its generators while others compute.
        wakeup: released each time when this task is to compute; the task acquires it first.
    """

    rng_states: list[torch.Tensor]
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    pinned_rows: set[int] = field(default_factory=set)
    wakeup: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_done: bool = False
    result: T | None = None


class MicroBatchScheduler:
    """Runs the micro-batches of one engine, one at a time.

    Attributes:
        task: the task that computes now; if nothing runs side by side, always the same one.
        is_active: several tasks are running.
        open_root_calls: open calls of the root module, in all tasks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._default_task: MicroBatchTask[Any] = MicroBatchTask([])
        self.task = self._default_task
        self.is_active = False
        self.open_root_calls = 0
        self._tasks: list[MicroBatchTask[Any]] = []
        # The values are called at the end of the round; each ends the use that it pins.
        self._pins: dict[PinKey, Callable[[], object]] = {}
        self._error: BaseException | None = None  # The reason why all tasks stop.
        self._all_done = threading.Event()  # We wait for it: an interrupt must not end the join of a running thread.

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run the jobs in rounds and return their results. If one raises, raises its error; the others are aborted."""
        if self.is_active:
            raise StateError(LEFTOVER_ERROR)
        tasks: list[MicroBatchTask[T]] = [
            MicroBatchTask(states) for states in _seeded_rng_states(len(jobs), self._device)
        ]
        thread_state = _ThreadState(self._device)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run_task, task, job, thread_state), daemon=True
            )
            for task, job in zip(tasks, jobs, strict=True)
        ]
        self._tasks, self._error, self.is_active = list(tasks), None, True
        self._all_done.clear()
        try:
            with deferring_interrupts:
                for thread in threads:
                    thread.start()
                tasks[0].wakeup.release()
            self._all_done.wait()
        except BaseException as error:  # an interrupt: each task ends when it would compute next
            self._error = self._error or error
            raise
        finally:
            with deferring_interrupts:
                self._join_threads(tasks, threads)
            failure, self._error = self._error, None
        if failure is not None:
            raise failure
        return [task.result for task in tasks]  # type: ignore[misc]  # None where T is

    def _join_threads(self, tasks: Sequence[MicroBatchTask[Any]], threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads. After a second interrupt only closing the engine helps (`LEFTOVER_ERROR`)."""
        if threads[-1].ident is None:  # it could not be started, and no task has begun
            for task in tasks:
                task.wakeup.release()
        else:
            while not self._all_done.wait(DEFER_SECONDS_MAX):
                deferring_interrupts.deliver_overdue()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self.task = self._default_task
        self.is_active = False
        self.open_root_calls = 0
        self._tasks = []
        self._pins.clear()
        _set_rng_states(tasks[0].rng_states, self._device)

    def yield_to_next(self) -> None:
        """Let the other tasks compute before a new unit is begun. Returns when this task is to compute again."""
        task = self.task
        if self._error is not None:
            raise _Stopped(LEFTOVER_ERROR)
        if task.pinned_rows:
            return
        next_task = self._next_task(task)
        if next_task is task:
            return
        task.rng_states = _rng_states(self._device)
        next_task.wakeup.release()
        self._wait_for_wakeup(task)

    def fail(self, error: BaseException) -> None:
        """A forward was aborted, and with it the uses that all tasks share: no task computes again."""
        if self.is_active:
            self._fail(error)

    def pin_once(self, key: PinKey, unpin: Callable[[], object]) -> bool:
        """True if this round had not pinned `key`. It has from now on, until `unpin` is called at the round's end."""
        if not self.is_active or key in self._pins:
            return False
        self._pins[key] = unpin
        return True

    def unpin_for_room(self) -> bool:
        """There is no room for a unit that is needed now: end the uses that the round pins. False: it pins none."""
        had_pins = bool(self._pins)
        self.unpin()
        return had_pins

    def is_pinned(self, key: PinKey) -> bool:
        return key in self._pins

    def _next_task(self, task: MicroBatchTask[Any]) -> MicroBatchTask[Any]:
        """The next task; if that is the first running one again, the round ends."""
        position = self._tasks.index(task)
        later = (other for other in self._tasks[position + 1 :] if not other.is_done)
        next_task = next(later, None)
        if next_task is None:
            self.unpin()
            next_task = next((other for other in self._tasks if not other.is_done), task)
        return next_task

    def unpin(self, kind: str | None = None) -> None:
        """End the uses that the round pins (of this kind; None: all): no task needs them, or there is no room."""
        for key in [key for key in reversed(self._pins) if kind in (None, key[0])]:
            self._pins.pop(key)()

    def _wait_for_wakeup(self, task: MicroBatchTask[Any]) -> None:
        task.wakeup.acquire()
        self.task = task
        if self._error is not None:
            raise _Stopped
        _set_rng_states(task.rng_states, self._device)

    def _run_task(self, task: MicroBatchTask[T], job: Callable[[], T], thread_state: _ThreadState) -> None:
        try:
            self._wait_for_wakeup(task)
            with thread_state.activate():
                task.result = job()
            task.rng_states = _rng_states(self._device)
        except BaseException as error:
            self._fail(error)
        task.is_done = True
        try:
            next_task = self._next_task(task)
        except BaseException as error:
            self._fail(error)
            next_task = self._next_task(task)  # this cannot raise: after `_fail` the round pins nothing
        if next_task is task:
            self._all_done.set()
        else:
            next_task.wakeup.release()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self._error = self._error or error
        self._pins.clear()  # no task uses them any more


class _ThreadState:
    """torch's per-thread state, which a micro-batch inherits from the thread that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gradients, self._threads = device, torch.is_grad_enabled(), torch.get_num_threads()
        self._default = torch.get_default_device()
        kinds = {kind for kind in ("cpu", device.type) if torch.is_autocast_enabled(kind)}
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        self._stream = module_of(device).current_stream(device) if is_accelerator(device) else None

    @contextmanager
    def activate(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)  # OpenMP gives a new thread its default: products would have other bits
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(self._gradients))
            # Otherwise a backward would run in autograd's thread of the device, and wait for its wakeup there.
            contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._default != HOST:
                contexts.enter_context(self._default)
            for kind, dtype in self._autocast.items():
                contexts.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            if self._stream is not None:
                contexts.enter_context(module_of(self._device).stream(self._stream))
            yield


def _rng_states(device: torch.device) -> list[torch.Tensor]:
    """States of the generators that a model draws from."""
    return [rng_state(place) for place in dict.fromkeys((HOST, device))]


def _set_rng_states(states: list[torch.Tensor], device: torch.device) -> None:
    for state, place in zip(states, dict.fromkeys((HOST, device)), strict=True):
        set_rng_state(state, place)


def _seeded_rng_states(count: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The process's states, then states seeded from them; the process's generators do not change."""
    states = _rng_states(device)
    yield states
    seeds = torch.Generator(HOST)
    seeds.set_state(states[0])
    for seed in torch.randint(2**63 - 1, (count - 1,), generator=seeds, device=HOST).tolist():
        yield [torch.Generator(place).manual_seed(seed).get_state() for place in dict.fromkeys((HOST, device))]
