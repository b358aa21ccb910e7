"""Predicts which of several like-typed modules a forward will call: experts, branches, layers that may be skipped.

Units of the children of one ModuleList are *siblings*. While every forward uses all of them, they are an ordinary
sequence. They become *routed* once more forwards have left some out than have used all: their order predicts nothing,
and the trace represents them by one symbol. Then the share of forwards that used a sibling decides its prefetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FIRST_SYMBOL = -10  # Symbols of routed siblings count down from here; units are not negative.

CERTAIN_SHARE = 0.75  # A sibling with this share of recent forwards is prefetched: one fetch in four may be unused.
FORK_USES_MAX = 1.25  # If a forward uses at most so many of the less certain siblings, they are branches of a fork.
FORK_SHARE = 0.25  # Branches with at least this share are prefetched. One expert of many never has it.
# If a forward uses more siblings than this that we cannot predict, we do not plan beyond them.
UNPREDICTED_USES_MAX = 0.5
RECENT_FORWARDS = 16
PRIOR_FORWARDS = 4  # At first all siblings have equal shares; this prior counts as much as so many forwards.


@dataclass(slots=True)
class _Shares:
    """How often each sibling was used, counting forwards of one phase that used any of them."""

    forwards: int = 0
    share_of: dict[int, float] = field(default_factory=dict)


class Routing:
    """Statistics of siblings; units and groups are ints.

    `group_of`: unit -> its group of siblings; units without siblings are absent.
    """

    def __init__(self, group_of: Mapping[int, int]) -> None:
        self._group_of = dict(group_of)
        self._members: dict[int, list[int]] = {}
        for unit, group in sorted(self._group_of.items()):
            self._members.setdefault(group, []).append(unit)
        # By group: forwards that used a part, minus those that used all.
        self._partial_forwards: Counter[int] = Counter()
        self._routed_groups: set[int] = set()
        self._used_units: dict[int, set[int]] = {}
        self._shares: dict[tuple[str, int], _Shares] = {}
        self._guesses: dict[tuple[str, int], tuple[list[int], float]] = {}  # Results of `_likely`.

    def begin_forward(self) -> None:
        self._used_units = {}

    def use(self, unit: int) -> None:
        group = self._group_of.get(unit)
        if group is not None:
            self._used_units.setdefault(group, set()).add(unit)

    def end_forward(self, phase: str) -> frozenset[int]:
        """Learn from the forward that is over. Returns the units whose symbol has changed."""
        changed: set[int] = set()
        self._guesses = {}
        for group, used in self._used_units.items():
            members = self._members[group]
            self._partial_forwards[group] += 1 if len(used) < len(members) else -1
            if group not in self._routed_groups and self._partial_forwards[group] > 0:
                self._routed_groups.add(group)
                changed.update(members)
            if group in self._routed_groups:
                self._learn(self._shares.setdefault((phase, group), _Shares()), members, used)
        self._used_units = {}
        return frozenset(changed)

    def symbol(self, unit: int) -> int:
        """The unit's symbol in the trace: the unit itself, or one symbol for all its siblings once they are routed."""
        group = self._group_of.get(unit)
        return unit if group is None or group not in self._routed_groups else FIRST_SYMBOL - group

    def is_routed(self, symbol: int) -> bool:
        """True for a symbol that represents siblings."""
        return symbol <= FIRST_SYMBOL

    def units(self, symbol: int, phase: str) -> Sequence[int]:
        """The units worth fetching for a use of routed siblings, in model order, without those already used."""
        units, used = self._likely(symbol, phase)[0], self._used_units.get(FIRST_SYMBOL - symbol)
        return [unit for unit in units if unit not in used] if used else units

    def is_unpredictable(self, symbol: int, phase: str) -> bool:
        """True when a use of the symbol is likely to use units that `units` does not name."""
        return self.is_routed(symbol) and self._likely(symbol, phase)[1] > UNPREDICTED_USES_MAX

    def _likely(self, symbol: int, phase: str) -> tuple[list[int], float]:
        """(units worth fetching, expected number of other units that a forward uses)."""
        if (phase, symbol) not in self._guesses:
            group = FIRST_SYMBOL - symbol
            shares = self._shares.get((phase, group), _Shares()).share_of
            unsure = sum(share for share in shares.values() if share < CERTAIN_SHARE)
            least = FORK_SHARE if unsure <= FORK_USES_MAX else CERTAIN_SHARE
            likely = [unit for unit in self._members[group] if shares.get(unit, 0.0) >= least]
            others = sum(shares.values()) - sum(shares[unit] for unit in likely)
            self._guesses[phase, symbol] = likely, others
        return self._guesses[phase, symbol]

    @staticmethod
    def _learn(shares: _Shares, members: list[int], used: set[int]) -> None:
        if not shares.share_of:
            shares.share_of = dict.fromkeys(members, len(used) / len(members))
        shares.forwards += 1
        weight = max(1 / RECENT_FORWARDS, 1 / (shares.forwards + PRIOR_FORWARDS))
        for unit in members:
            shares.share_of[unit] += weight * ((unit in used) - shares.share_of[unit])
