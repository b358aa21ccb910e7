"""Memory under the live limit for rows of packed experts, which come and go apart from their unit."""

from __future__ import annotations

from abc import abstractmethod

from offload.errors import BudgetError
from offload.memory.arena import Block
from zero.params.layout import Layout, Unit
from zero.plan.limits import Limits
from zero.schedule.counters import FetchCounters
from zero.schedule.loader import Loader
from zero.schedule.shortage import no_room
from zero.store.storage import Storage


class LendsRows:
    """Mixed into the coordinator, which makes room."""

    counters: FetchCounters
    _layout: Layout
    _limits: Limits
    _loader: Loader
    _numel: dict[int, int]
    _storage: Storage
    _lent_numel: int

    @abstractmethod
    def _resident(self) -> list[int]: ...

    @abstractmethod
    def _movable(self) -> list[int]: ...

    @abstractmethod
    def _evict_furthest(self, candidates: list[int]) -> None: ...

    @abstractmethod
    def _in_use(self) -> set[int]: ...

    def lease_rows(self, unit: Unit, numel: int) -> Block:
        """Memory for rows of the unit; what is not in use makes room. Give it back with `return_rows`.

        Raises:
            BudgetError: what is in use leaves no room.
        """
        nbytes, block = numel * unit.dtype.itemsize, None
        limit_numel = self._limits.live_numel_max - self._lent_numel - numel
        while block is None:
            candidates = self._movable()
            if sum(self._numel[i] for i in self._resident()) <= limit_numel:
                block = self._loader.lease(nbytes)
            elif not candidates:
                raise self._no_room(f"experts of {unit.name}", numel)
            if block is None and candidates:
                self._evict_furthest(candidates)
            elif block is None:
                block = self._storage.unit_pool.lease(nbytes, f"rows of {unit.name}")
        self._lent_numel += numel
        self.counters.gathers += 1
        self.counters.gathered_bytes += block.data.numel()
        self.counters.expert_row_bytes += block.data.numel()
        self._note_live()
        return block

    def return_rows(self, block: Block, numel: int) -> None:
        """The rows are used no longer."""
        self._lent_numel -= numel
        block.release(self._storage.streams.fence())

    def _no_room(self, what: str, numel: int) -> BudgetError:
        in_use = [self._layout.units[i] for i in sorted(self._in_use())]
        return no_room(what, numel, in_use, self._lent_numel, self._limits.live_numel_max)

    def _note_live(self) -> None:
        live = sum(self._numel[i] for i in self._resident()) + self._lent_numel
        self.counters.live_numel_peak = max(self.counters.live_numel_peak, live)
