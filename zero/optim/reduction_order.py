"""In which order the ranks reduce the gradients of a backward."""

from __future__ import annotations

from collections.abc import Iterable


class ReductionOrder:
    """In which order one rank starts reductions. Pure: units are ints.

    Each backward of a step has an order of its own, known by its number.

    Args:
        expected: the order of a backward that is the first of its number.
    """

    def __init__(self, expected: list[int]) -> None:
        self._expected, self._orders = expected, dict[int, list[int]]()
        self._number = -1
        self._next = 0
        self._seen: list[int] = []
        self._irregular: set[int] = set()
        """Units that some backward had not; nobody waits for them any more."""

    def begin_step(self) -> None:
        """The next backward is the first of a step."""
        self._number = -1

    def begin_backward(self) -> None:
        """A backward begins whose gradients are reduced."""
        self._number += 1
        self._next, self._seen = 0, []

    def complete(self, unit: int, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order.

        Args:
            unit: has a gradient of this backward now.
            waiting: all that have one, of this backward or an earlier one, and are not reduced yet.
        """
        self.see(unit)
        return self.go_on(waiting)

    def see(self, unit: int) -> None:
        """A unit has a gradient now; what is due is asked for later."""
        if unit not in self._seen:
            self._seen.append(unit)

    def go_on(self, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order, of those that have a gradient and are not reduced yet."""
        # What only an earlier backward has given is not ready: reduced now, it would have to be reduced again.
        ready, now = set(waiting).intersection(self._seen), list[int]()
        while self._next < len(self._order) and self._order[self._next] in ready:
            now.append(self._order[self._next])
            self._next += 1
        return now

    def rest(self) -> list[int]:
        """The backward is over: what else of the agreed order has to be reduced, in order."""
        now, self._next = self._order[self._next :], len(self._order)
        return now

    @property
    def _order(self) -> list[int]:
        return self._orders.get(self._number, self._expected)

    @property
    def seen(self) -> list[int]:
        """Units that had a gradient in this backward, in the order of their first."""
        return self._seen

    def agree(self, seen: list[list[int]]) -> None:
        """The next backward of this number follows what the ranks (in rank order) had in this one."""
        everywhere = set(seen[0]).intersection(*seen[1:])
        self._irregular |= set(self._order) - everywhere
        self._orders[self._number] = [unit for unit in seen[0] if unit in everywhere - self._irregular]
