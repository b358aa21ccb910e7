"""Micro-batches side by side: one of them computes at a time, and at each unit the next one takes its turn.

[Note: vertical order] Each micro-batch runs in a thread of its own, because autograd and a model's forward keep what
they have open on the stack. Whoever is about to begin a unit that nobody uses hands over to the next one, so all
pass one unit before the first begins the next: its weights come once, and its gradients are added up in the order of
the micro-batches, as they are when these run one after the other. A round is over when the first one is about to go
on; what the round has brought in is held until then. A backward begins as soon as its forward is over, so what a loss
needs (logits above all) is there for one micro-batch at a time. Paths through the model may differ between
micro-batches: then units come again, and sums may be made in another order; so they are of a module whose uses are
recomputed one by one (`use_reentrant=True`).

[Note: random numbers] A recomputation draws what its forward has drawn, so each micro-batch has its own generators:
the first goes on with those of the process, which have its state in the end, the others' are seeded from them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from offload.accelerator import HOST, is_accelerator, module_of, rng_state, set_rng_state
from offload.errors import StateError
from offload.system.interrupts import LATE_SECONDS, uninterrupted
from zero.schedule.open_calls import OpenCalls

T = TypeVar("T")
LEFT = "train_batch: an interrupt has left micro-batches behind that wait for something; close the engine"
Held = tuple[str, int]
"""What a unit is held for, and its index."""


class _Stopped(BaseException):
    """Another micro-batch has failed, or the one who waits for all was interrupted."""


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """One micro-batch.

    Attributes:
        open: what its forward has open.
        keeps: what its backward has in memory that the others need too; it goes on until gradients have passed that.
        random: states of its generators while others compute.
        turn: taken by who computes; one is given for each turn.
    """

    random: list[torch.Tensor]
    open: OpenCalls = field(default_factory=OpenCalls)
    keeps: set[int] = field(default_factory=set)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: bool = False
    result: T | None = None


class Turns:
    """Of one engine.

    Attributes:
        lane: whose turn it is; where nothing runs side by side there is one, always the same.
        on: several are running.
        roots: calls of the whole model that are open, in all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone: Lane[Any] = Lane([])
        self.lane, self.on, self.roots = self._alone, False, 0
        self._lanes: list[Lane[Any]] = []
        self._held: dict[Held, Callable[[], object]] = {}  # What lets go of it at the end of the round.
        self._error: BaseException | None = None  # Why all of them stop.
        self._finished = threading.Event()  # To join a thread that runs is nothing that an interrupt may end.

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the jobs, which take turns. Raises what one of them raises; the others are broken off."""
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
            with uninterrupted:
                for thread in threads:
                    thread.start()
                lanes[0].turn.release()
            self._finished.wait()
        except BaseException as error:  # an interrupt: they end at their next turn
            self._error = self._error or error
            raise
        finally:
            with uninterrupted:
                self._end(lanes, threads)
            failed, self._error = self._error, None
        if failed is not None:
            raise failed
        return [lane.result for lane in lanes]  # type: ignore[misc]  # None where T is

    def _end(self, lanes: Sequence[Lane[Any]], threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads. A second interrupt leaves one that waits for something else: all is over then."""
        if threads[-1].ident is None:  # it could not be started, and nobody has begun
            for lane in lanes:
                lane.turn.release()
        else:
            while not self._finished.wait(LATE_SECONDS):
                uninterrupted.deliver_late()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self.lane, self.on, self.roots, self._lanes = self._alone, False, 0, []
        self._held.clear()
        _set_states(lanes[0].random, self._device)

    def take(self) -> None:
        """A new unit is about to be begun: the others have their turns before. Returns when it is this one's again."""
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
        """A forward has been broken off, and with it what all others use: they end at their next turn."""
        if self.on:
            self._fail(error)

    def first(self, what: Held, let_go: Callable[[], object]) -> bool:
        """True where this round does not hold it: it does from now on, until `let_go` is called at the round's end."""
        if not self.on or what in self._held:
            return False
        self._held[what] = let_go
        return True

    def relieve(self) -> bool:
        """There is no room for what is needed now: let go of what the round holds. False: it holds nothing."""
        held = bool(self._held)
        self.let_go()
        return held

    def holds(self, what: Held) -> bool:
        return what in self._held

    def _following(self, lane: Lane[Any]) -> Lane[Any]:
        """Who is next; a round ends where the first of those that run is."""
        position = self._lanes.index(lane)
        later = (each for each in self._lanes[position + 1 :] if not each.over)
        following = next(later, None)
        if following is None:
            self.let_go()
            following = next((each for each in self._lanes if not each.over), lane)
        return following

    def let_go(self, kind: str | None = None) -> None:
        """Nobody of this round needs what it holds (of this kind; None: of any), or there is no room for it."""
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
            following = self._following(lane)  # what was held is not, after that
        if following is lane:
            self._finished.set()
        else:
            following.turn.release()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self._error = self._error or error
        self._held.clear()  # nobody uses it any more


class _ThreadState:
    """What torch keeps for each thread and a micro-batch inherits from the one that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gradients = device, torch.is_grad_enabled()
        self._default = torch.get_default_device()
        kinds = {kind for kind in ("cpu", device.type) if torch.is_autocast_enabled(kind)}
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        self._stream = module_of(device).current_stream(device) if is_accelerator(device) else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(self._gradients))
            # Else a backward would run in a thread that is the device's, and wait for its turn there.
            contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._default != HOST:
                contexts.enter_context(self._default)
            for kind, dtype in self._autocast.items():
                contexts.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            if self._stream is not None:
                contexts.enter_context(module_of(self._device).stream(self._stream))
            yield


def _states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that a model draws from."""
    return [rng_state(each) for each in dict.fromkeys((HOST, device))]


def _set_states(states: list[torch.Tensor], device: torch.device) -> None:
    for state, each in zip(states, dict.fromkeys((HOST, device)), strict=True):
        set_rng_state(state, each)


def _seeded_states(count: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Those of the process, then others that follow from them; the process's stay as they are."""
    states = _states(device)
    yield states
    seeds = torch.Generator(HOST)
    seeds.set_state(states[0])
    for seed in torch.randint(2**63 - 1, (count - 1,), generator=seeds, device=HOST).tolist():
        yield [torch.Generator(each).manual_seed(seed).get_state() for each in dict.fromkeys((HOST, device))]
