"""Micro-batches side by side: one of them computes at a time, and at each unit the next one takes its turn.

[Note: vertical order] Each micro-batch runs in a thread of its own, because autograd and a model's forward keep their
open calls on the stack. A micro-batch that is about to begin a unit that nobody uses hands over to the next one. So all
micro-batches pass one unit before the first begins the next: its weights are fetched once, and its gradients are added
up in the order of the micro-batches, as if these ran one after the other. A round is over when the first micro-batch is
about to continue; units that the round has fetched are held until then. A backward begins as soon as its forward is
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
LEFT = "train_batch: an interrupt left unfinished micro-batches behind; close the engine"
Held = tuple[str, int]
"""(why a unit is held, its index)."""


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
    begun: list[int] = field(default_factory=list)  # Forward uses that end with the call.
    sentinel: torch.Tensor | None = None
    # Inputs, their version counters and grad_fns, to see which the call modifies in place.
    versions: list[tuple[torch.Tensor, int, Any]] = field(default_factory=list)

    def close(self) -> None:
        """Drop the references to the graph: its nodes refer to this object, and nothing would free that cycle."""
        self.sentinel = None
        self.versions = []


@dataclass(slots=True)
class OpenCalls:
    """The open calls of one forward; empty if none runs.

    Attributes:
        calls: innermost last.
        look: an operation that reads units which no open call uses.
        root_depth: open calls of the whole model.
    """

    calls: list[OpenCall] = field(default_factory=list)
    look: OpenCall | None = None
    root_depth: int = 0
    backward_follows: bool = True

    def forget(self) -> None:
        """Drop all open calls: they were interrupted."""
        for call in self.calls:
            call.close()
        self.calls.clear()


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """One micro-batch.

    Attributes:
        open: the open calls of its forward.
        keeps: loans of rows that its backward has in memory that the others need too; until gradients have passed
            them it does not hand over its turn.
        random: states of its generators while others compute.
        turn: a semaphore, released once for each turn; the lane acquires it and computes.
    """

    random: list[torch.Tensor]
    open: OpenCalls = field(default_factory=OpenCalls)
    keeps: set[int] = field(default_factory=set)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: bool = False
    result: T | None = None


class Turns:
    """The turns of one engine's micro-batches.

    Attributes:
        lane: the lane whose turn it is; if nothing runs side by side, always the same one.
        on: several lanes are running.
        roots: open calls of the whole model, in all lanes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone: Lane[Any] = Lane([])
        self.lane, self.on, self.roots = self._alone, False, 0
        self._lanes: list[Lane[Any]] = []
        self._held: dict[Held, Callable[[], object]] = {}  # The values are called at the end of the round, to release.
        self._error: BaseException | None = None  # The reason why all lanes stop.
        self._finished = threading.Event()  # We wait for it: an interrupt must not end the join of a running thread.

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run the jobs in turns and return their results. If one raises, raises its error; the others are aborted."""
        if self.on:
            raise StateError(LEFT)
        lanes: list[Lane[T]] = [Lane(states) for states in _seeded_states(len(jobs), self._device)]
        thread_state = _ThreadState(self._device)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._work, lane, job, thread_state), daemon=True
            )
            for lane, job in zip(lanes, jobs, strict=True)
        ]
        self._lanes, self._error, self.on = list(lanes), None, True
        self._finished.clear()
        try:
            with deferring_interrupts:
                for thread in threads:
                    thread.start()
                lanes[0].turn.release()
            self._finished.wait()
        except BaseException as error:  # an interrupt: the lanes end at their next turn
            self._error = self._error or error
            raise
        finally:
            with deferring_interrupts:
                self._end(lanes, threads)
            failed, self._error = self._error, None
        if failed is not None:
            raise failed
        return [lane.result for lane in lanes]  # type: ignore[misc]  # None where T is

    def _end(self, lanes: Sequence[Lane[Any]], threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads. A second interrupt ends this wait; then only closing the engine helps (`LEFT`)."""
        if threads[-1].ident is None:  # it could not be started, and no lane has begun
            for lane in lanes:
                lane.turn.release()
        else:
            while not self._finished.wait(DEFER_SECONDS_MAX):
                deferring_interrupts.deliver_overdue()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self.lane, self.on, self.roots, self._lanes = self._alone, False, 0, []
        self._held.clear()
        _set_states(lanes[0].random, self._device)

    def take(self) -> None:
        """Give the other lanes their turns before a new unit is begun. Returns when it is this lane's turn again."""
        lane = self.lane
        if self._error is not None:
            raise _Stopped(LEFT)
        if lane.keeps:
            return
        following = self._following(lane)
        if following is lane:
            return
        lane.random = _states(self._device)
        following.turn.release()
        self._await_turn(lane)

    def fail(self, error: BaseException) -> None:
        """A forward was aborted, and with it the uses that all lanes share: the others end at their next turn."""
        if self.on:
            self._fail(error)

    def first(self, what: Held, let_go: Callable[[], object]) -> bool:
        """True if this round did not hold `what`. It does from now on, until `let_go` is called at the round's end."""
        if not self.on or what in self._held:
            return False
        self._held[what] = let_go
        return True

    def relieve(self) -> bool:
        """There is no room for a unit that is needed now: end the uses that the round holds. False: it holds none."""
        held = bool(self._held)
        self.let_go()
        return held

    def holds(self, what: Held) -> bool:
        return what in self._held

    def _following(self, lane: Lane[Any]) -> Lane[Any]:
        """The next lane; if that is the first running one again, the round ends."""
        position = self._lanes.index(lane)
        later = (each for each in self._lanes[position + 1 :] if not each.over)
        following = next(later, None)
        if following is None:
            self.let_go()
            following = next((each for each in self._lanes if not each.over), lane)
        return following

    def let_go(self, kind: str | None = None) -> None:
        """End the uses that the round holds (of this kind; None: all): no lane needs them, or there is no room."""
        for what in [what for what in reversed(self._held) if kind in (None, what[0])]:
            self._held.pop(what)()

    def _await_turn(self, lane: Lane[Any]) -> None:
        lane.turn.acquire()
        self.lane = lane
        if self._error is not None:
            raise _Stopped
        _set_states(lane.random, self._device)

    def _work(self, lane: Lane[T], job: Callable[[], T], thread_state: _ThreadState) -> None:
        try:
            self._await_turn(lane)
            with thread_state.entered():
                lane.result = job()
            lane.random = _states(self._device)
        except BaseException as error:
            self._fail(error)
        lane.over = True
        try:
            following = self._following(lane)
        except BaseException as error:
            self._fail(error)
            following = self._following(lane)  # this cannot raise: after `_fail` the round holds nothing
        if following is lane:
            self._finished.set()
        else:
            following.turn.release()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self._error = self._error or error
        self._held.clear()  # no lane uses it any more


class _ThreadState:
    """torch's per-thread state, which a micro-batch inherits from the thread that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gradients, self._threads = device, torch.is_grad_enabled(), torch.get_num_threads()
        self._default = torch.get_default_device()
        kinds = {kind for kind in ("cpu", device.type) if torch.is_autocast_enabled(kind)}
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        self._stream = module_of(device).current_stream(device) if is_accelerator(device) else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)  # OpenMP gives a new thread its default: products would have other bits
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(self._gradients))
            # Otherwise a backward would run in autograd's thread of the device, and wait for its turn there.
            contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._default != HOST:
                contexts.enter_context(self._default)
            for kind, dtype in self._autocast.items():
                contexts.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            if self._stream is not None:
                contexts.enter_context(module_of(self._device).stream(self._stream))
            yield


def _states(device: torch.device) -> list[torch.Tensor]:
    """States of the generators that a model draws from."""
    return [rng_state(each) for each in dict.fromkeys((HOST, device))]


def _set_states(states: list[torch.Tensor], device: torch.device) -> None:
    for state, each in zip(states, dict.fromkeys((HOST, device)), strict=True):
        set_rng_state(state, each)


def _seeded_states(count: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The process's states, then states seeded from them; the process's generators do not change."""
    states = _states(device)
    yield states
    seeds = torch.Generator(HOST)
    seeds.set_state(states[0])
    for seed in torch.randint(2**63 - 1, (count - 1,), generator=seeds, device=HOST).tolist():
        yield [torch.Generator(each).manual_seed(seed).get_state() for each in dict.fromkeys((HOST, device))]
