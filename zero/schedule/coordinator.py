"""Brings units in before they are used and lets them go after: one writer of every unit's state.

A unit is away, arriving (a read is under way), arrived (its values wait in a block) or bound (its
parameters see them). Hooks say when uses begin and end; the policy says what to load and to evict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from offload.accelerator import HOST, is_accelerator
from offload.errors import StateError, tell
from offload.memory.flat_storage import Poison, exact_alias
from zero.params.binding import BoundUnit
from zero.params.layout import Layout, Unit, siblings
from zero.plan.limits import Limits
from zero.schedule.counters import FetchCounters
from zero.schedule.editors import LendsUnits
from zero.schedule.hot import HotUnits
from zero.schedule.lending import LendsRows
from zero.schedule.loader import Arrival, Loader
from zero.schedule.policy import make_room, plan_prefetch, reuse_distance, until
from zero.schedule.trace import GENERATE, Trace
from zero.store.storage import Storage


class Coordinator(LendsRows, LendsUnits):
    """Owner of residency on the device."""

    def __init__(
        self, layout: Layout, bound: list[BoundUnit], storage: Storage, limits: Limits, loader: Loader
    ) -> None:
        self.trace = Trace(siblings(layout.units))
        self.counters = FetchCounters()
        self.accumulating = False
        """True while the weights will stay as they are after this backward: its prefetch may cross the boundary."""
        self._layout, self._bound, self._storage, self._limits = layout, bound, storage, limits
        self._loader = loader
        self._numel = {unit.index: unit.numel for unit in layout.units}
        movable = {unit.index: unit.numel for unit in layout.units if not unit.persistent}
        self._hot = HotUnits(movable, limits.live_numel_max)
        self._arrivals: dict[int, Arrival] = {}
        self._live: dict[int, Arrival] = {}
        self._forward_uses: Counter[int] = Counter()
        self._backward_uses: Counter[int] = Counter()
        self._in_backward = False
        self._recomputed: set[int] = set()
        """Units that a backward has brought in; they stay until a backward use of them ends, or the backward."""
        self._recomputing: Counter[int] = Counter()
        """Open calls of a recomputation."""
        self._seen: set[int] = set()
        """Units that somebody has looked at with gradients outside any call: they stay until a backward has passed."""
        self._lent_numel = 0
        """Rows of packed experts that are in use."""
        self._held: set[int] = set()
        """Units bound by an editor."""

    # ---- uses ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where units are computed on."""
        return self._storage.device

    def unit(self, index: int) -> Unit:
        """The unit of that index."""
        return self._layout.units[index]

    def in_forward_use(self, index: int) -> bool:
        """True while a forward use of the unit is open, and for a unit that is always there."""
        return bool(self._forward_uses[index]) or self._persistent(index)

    def begin_forward(self, *, training: bool, backward_follows: bool) -> None:
        """The root's forward begins: bring in what it uses first."""
        self._in_backward = False
        phase = GENERATE if self._hot.on else "train" if training else "eval"
        self.trace.begin_forward(phase, backward_follows=backward_follows)
        self._prefetch(with_backward=backward_follows)

    def begin_generation(self) -> None:
        """Forward will follow forward, with the same weights: what fits stays from one to the next."""
        self._hot.begin()
        self._expect(GENERATE, with_backward=False)

    def end_generation(self) -> None:
        """What was kept is let go, unless it is in use."""
        for index in self._hot.end():
            if index in self._live and not self._used(index):
                self._release(index)

    def begin_forward_use(self, index: int, *, backward_follows: bool) -> bool:
        """A module that uses the unit is called. True if this is the outermost such call."""
        self._forward_uses[index] += 1
        if self._forward_uses[index] > 1:
            return False
        if self._persistent(index):
            self._loader.follow_persistent()
        else:
            self._in_backward = False
            self.trace.use_forward(index, backward_follows=backward_follows)
            self._hot.used(index)
            try:
                self._bring(index)
            except BaseException:
                self._forward_uses[index] -= 1
                raise
            self._prefetch(with_backward=backward_follows)
        return True

    def end_forward_use(self, index: int, *, backward_follows: bool) -> bool:
        """Such a call returned. True if it was the outermost."""
        self._forward_uses[index] = max(self._forward_uses[index] - 1, 0)
        if self._forward_uses[index]:
            return False
        self.trace.end_use(index)
        if not self._persistent(index) and not self._backward_uses[index]:
            if backward_follows:
                self.trace.end_use(index)
            self._keep_or_release(index, self.trace.upcoming_in_forward(with_backward=backward_follows))
        return True

    def begin_backward_use(self, index: int) -> None:
        """Gradients have reached an output of a module that uses the unit, or it is being recomputed."""
        if not self._backward_uses[index]:
            self.begin_recompute(index)
        self._backward_uses[index] += 1

    def begin_recompute(self, index: int, *, by_call: bool = False) -> None:
        """A forward inside backward uses the unit: it stays until a backward use of it ends, where there is room.

        Args:
            index: the unit.
            by_call: a call does, and `end_recompute` will say when it returns.
        """
        self._recomputing[index] += by_call
        if self._persistent(index) or self._backward_uses[index] or index in self._recomputed:
            return
        self._in_backward = True
        self.trace.use_backward(index)
        self._bring(index)
        self._recomputed.add(index)
        self._prefetch(with_backward=True)

    def end_recompute(self, indices: Iterable[int]) -> None:
        """A call returned that began to recompute: until gradients reach it, its units may go for others."""
        for index in indices:
            self._recomputing[index] = max(self._recomputing[index] - 1, 0)

    def end_backward_use(self, index: int) -> bool:
        """Gradients have passed such a call. True if that was the last open use; ignored if none was open."""
        if not self._backward_uses[index]:
            return False
        self._backward_uses[index] -= 1
        if self._backward_uses[index]:
            return False
        self._recomputed.discard(index)
        if not self._forward_uses[index] and not self._persistent(index):
            self._keep_or_release(index, self.trace.upcoming_in_backward(forward_follows=self.accumulating))
        return True

    def look(self, index: int) -> None:
        """A bound unit is looked at outside any call; a graph may need its values in the next backward."""
        if torch.is_grad_enabled() and index in self._live:
            self._seen.add(index)

    def end_backward(self) -> None:
        """The outermost backward is over: whatever hooks did or did not see, no use is open."""
        open_uses = {index for index, count in self._backward_uses.items() if count} | self._recomputed | self._seen
        self._seen.clear()
        self._backward_uses.clear()
        self._recomputed.clear()
        self._recomputing.clear()
        for index in open_uses:
            if not self._forward_uses[index] and not self._persistent(index):
                self._keep_or_release(index, self.trace.upcoming_in_backward(forward_follows=self.accumulating))
        self.trace.end_backward()

    def end_forward(self, next_phase: str | None = None) -> None:
        """The root's forward is over, well or not: no forward use is open.

        Args:
            next_phase: a forward of that phase may follow at once, with no backward between.
        """
        self.trace.end_forward()
        open_uses = [index for index, count in self._forward_uses.items() if count]
        self._forward_uses.clear()
        for index in open_uses:
            if not self._persistent(index) and not self._used(index):
                self._release(index)
        if next_phase is not None:
            self._expect(GENERATE if self._hot.on else next_phase, with_backward=False)

    def bound(self, index: int) -> bool:
        """True while the unit's parameters see their values."""
        return self._bound[index].bound

    def bind_persistent(self) -> None:
        """Bind the units that never leave the device to their home, where they are not."""
        self._loader.complete_persistent()
        for unit in self._layout.units:
            memory = self._storage.flat(unit) if unit.persistent else None
            if memory is not None and not self._bound[unit.index].bound:
                self._bound[unit.index].bind(exact_alias(memory))

    def step_taken(self) -> None:
        """A step is fixed: what comes in from now on has to be as of that step. A training forward comes next."""
        self._loader.step_taken()

    def expect_forward(self) -> None:
        """A training forward comes next: begin to bring in what it uses first."""
        self._expect("train", with_backward=True)

    def _expect(self, phase: str, *, with_backward: bool) -> None:
        self._in_backward = False
        self.trace.expect_forward(phase)
        self._prefetch(with_backward=with_backward)

    def settle(self) -> None:
        """Wait until what was begun ahead is there, or will not be."""
        for arrival in self._arrivals.values():
            if arrival.transfer is not None:
                arrival.transfer.settle()

    def check_idle(self) -> None:
        """Raise StateError if a unit is in use: a step or a close was asked for inside forward or backward."""
        busy = [self._layout.units[i].name for i in self._live if self._used(i)]
        if busy:
            raise StateError(f"units {', '.join(busy)} are in use: step() was called inside forward or backward")

    def release_all(self) -> None:
        """Let every unit go: its values are about to change, or the engine closes.

        Persistent units stay on the device, but their parameters look away until `bind_persistent`:
        where torch cannot swap storages they look at a copy.

        Raises:
            StateError: a unit is in use, or a parameter was given another shape; it keeps its values.
        """
        self.check_idle()
        self._seen.clear()
        self.trace.forget_forwards()
        for index in list(self._arrivals):
            self._discard(index)
        for index in list(self._live):
            self._release(index)
        self._loader.drain()
        refused: list[str] = []
        for unit in self._layout.units:
            if unit.persistent and self._bound[unit.index].bound:
                refused += self._bound[unit.index].recapture()
                self._bound[unit.index].unbind()
        if refused:
            raise StateError("; ".join(refused))

    def leave_device(self) -> None:
        """After `release_all`, when the engine closes: a model that lives on keeps none of the device's memory.

        What looks at its parameters past torch's dispatch finds NaN, now the host's.
        """
        if is_accelerator(self.device):
            poison = Poison(max((unit.nbytes for unit in self._layout.units), default=1), HOST)
            for bound in self._bound:
                bound.leave_device(poison)

    # ---- movement -----------------------------------------------------------------------------

    def _persistent(self, index: int) -> bool:
        return self._layout.units[index].persistent

    def _bring(self, index: int) -> None:
        """Bind the unit now, waiting for its values if they are not here."""
        counters = self.counters
        if index in self._live or index in self._held:
            counters.hits += 1
            if index in self._live:
                self._bound[index].show()
                self._loader.follow(self._live[index])
            return
        arrival = self._arrivals.get(index)
        if arrival is not None and arrival.outdated:
            self._discard(index)
            arrival = None
        if arrival is None:
            counters.misses += 1
            self._load(index)
            arrival = self._arrivals[index]
        elif arrival.settled:
            counters.hits += 1
        else:
            counters.late += 1
        try:
            self._loader.await_values(arrival)
        except BaseException as error:
            tell(error)
            self._discard(index)
            raise
        del self._arrivals[index]
        self._bound[index].bind(arrival.data)
        self._live[index] = arrival

    def _load(self, index: int) -> None:
        """Start the unit's way in, evicting what must go.

        Raises:
            BudgetError: what is in use now leaves no room.
        """
        unit = self._layout.units[index]
        resident, upcoming = self._resident(), self._horizon(with_backward=True)
        live_numel_max = self._limits.live_numel_max - self._lent_numel
        # What a generation keeps yields to what is needed now, and if it must, what waits for gradients after having
        # been recomputed; what is used goes under no circumstances.
        in_use = self._in_use()
        pins = [in_use | self._hot.kept, in_use, in_use - self._waiting()]
        choices = (make_room(index, resident, pinned, upcoming, self._numel, live_numel_max) for pinned in pins)
        evict = next((choice for choice in choices if choice is not None), None)
        if evict is None:
            raise self._no_room(f"unit {unit.name}", unit.numel)
        for other in evict:
            self._evict(other)
        self._start(unit, must=True)

    def _start(self, unit: Unit, *, must: bool) -> bool:
        """Start the unit's way in. False if no memory is free and it is no must."""
        arrival = self._loader.begin(unit)
        while arrival is None and must:
            # Enough is free, but in holes: the unit needed last makes room for a contiguous run.
            candidates = self._movable()
            if not candidates:
                self._loader.lease_error(unit).release()
            self._evict_furthest(candidates)
            arrival = self._loader.begin(unit)
        if arrival is None:
            return False
        self._arrivals[unit.index] = arrival
        self.counters.gathers += 1
        self.counters.gathered_bytes += unit.nbytes
        self.counters.whole_experts.update([unit.index] if unit.expert_rows else [])
        self._note_live()
        return True

    def _evict_furthest(self, candidates: list[int]) -> None:
        """What a generation keeps goes last."""
        upcoming = list(self._horizon(with_backward=True))
        last = {i: upcoming.index(i) if i in upcoming else len(upcoming) for i in candidates}
        self._evict(max(candidates, key=lambda i: (i not in self._hot.kept, last[i])))

    def _prefetch(self, *, with_backward: bool) -> None:
        limits = replace(self._limits, live_numel_max=self._limits.live_numel_max - self._lent_numel)
        moves = plan_prefetch(
            self._resident(), self._pinned(), self._horizon(with_backward=with_backward), self._numel, limits
        )
        for index in moves.evict:
            self._evict(index)
        for index in moves.load:
            if index not in self._held and not self._start(self._layout.units[index], must=False):
                break

    def _resident(self) -> list[int]:
        return [*self._live, *self._arrivals]

    def _in_use(self) -> set[int]:
        return {i for i in self._live if self._used(i) or i in self._seen}

    def _movable(self) -> list[int]:
        """What can make room: units that are not in use; without any, those that only wait for gradients."""
        resident, in_use, waiting = self._resident(), self._in_use(), self._waiting()
        return [i for i in resident if i not in in_use] or [i for i in resident if i in waiting]

    def _waiting(self) -> set[int]:
        """Recomputed units that no open call uses: gradients will bring them back."""
        open_calls = self._forward_uses | self._backward_uses | self._recomputing
        return {i for i in self._recomputed if not open_calls[i]}

    def _used(self, index: int) -> bool:
        return bool(self._forward_uses[index] or self._backward_uses[index] or index in self._recomputed)

    def _pinned(self) -> set[int]:
        """What a prefetch must not touch: units in use, kept, or on their way (ranks in step: arrived or not)."""
        on_their_way = {i for i, a in self._arrivals.items() if self._loader.in_step or not a.settled}
        return self._in_use() | self._hot.kept | on_their_way

    def _horizon(self, *, with_backward: bool) -> list[int]:
        """Predicted uses as far ahead as the policy can act on."""
        if self._in_backward:
            uses = self.trace.upcoming_in_backward(forward_follows=self.accumulating)
        else:
            uses = self.trace.upcoming_in_forward(with_backward=with_backward, to_fetch=True)
        return list(until(uses, 2 * self._limits.live_numel_max + self._limits.prefetch_numel, self._numel))

    def _keep_or_release(self, index: int, upcoming: Iterator[int]) -> None:
        if index in self._live:
            self._bound[index].hide()
        if index in self._seen:
            return
        colder = self._hot.offer(index, self._in_use()) if index in self._live else None
        if colder is not None:
            for other in colder:
                self._release(other)
            return
        reach = min(self._limits.reuse_numel_max, self._limits.live_numel_max)
        distance = reuse_distance(index, until(upcoming, reach, self._numel), self._numel)
        if distance is None or distance > reach:
            self._release(index)

    def _evict(self, index: int) -> None:
        if index in self._live:
            self._release(index)
        else:
            self._discard(index)

    def _release(self, index: int) -> None:
        arrival = self._live.pop(index, None)
        if arrival is None:
            return
        self._hot.forget(index)
        self._recomputed.discard(index)
        bound = self._bound[index]
        refused = bound.recapture()
        modified = bound.modified
        bound.unbind()
        self.counters.releases[index] += 1
        self._loader.end(self._layout.units[index], arrival, modified=modified)
        if refused:
            raise StateError(f"unit {self._layout.units[index].name}: {'; '.join(refused)}")

    def _discard(self, index: int) -> None:
        """Drop values that were loaded and never bound; waits until no byte moves any more."""
        self._loader.end(self._layout.units[index], self._arrivals.pop(index), modified=False)
