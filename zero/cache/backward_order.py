"""The order in which a backward uses units: the reverse of the order in which the forward's uses ended.

Activation checkpointing changes that. Where gradients reach a part of the model that is recomputed, the backward jumps
to the first unit of the part and uses the others in forward order; then gradients pass them in the reverse order.
Where it has jumped, it is expected to jump again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

FORWARDS_MAX = 16  # Forwards remembered for their backward; the backward of an older one costs one miss per unit.

USES_MAX = 1 << 16  # Limit for the uses of one forward, and of all remembered forwards: more than any model has.


class BackwardOrder:
    """Uses of the forwards that may have a backward, and the place that the running backward has reached.

    `symbol`: unit -> itself, or a number that stands for all its siblings (routing.py).
    """

    def __init__(self, symbol: Callable[[int], int]) -> None:
        self._symbol = symbol
        self._uses: list[int] = []
        self._starts: list[int] = []  # Where in `_uses` each forward begins.
        self._position: int | None = None  # Uses before it are still to come; None: all are.
        self._part: list[int] = []  # What is recomputed at present: the uses from the place reached on.
        self._jumped_over: list[int] = []  # Units of the part that are recomputed next, in forward order.
        self._to_pass: list[int] = []  # Then gradients pass these.
        self._first_of: dict[int, int] = {}  # Of a part that is recomputed: symbol of its last unit -> of its first.
        self._had_backward = False

    def begin_forward(self) -> None:
        if self._had_backward:
            self.forget_forwards()
        self._starts.append(len(self._uses))
        if len(self._starts) > FORWARDS_MAX:
            # Forwards that never have a backward (an evaluation without no_grad, for example).
            oldest = self._starts[1]
            self._uses = self._uses[oldest:]
            self._starts = [start - oldest for start in self._starts[1:]]

    def append_use(self, unit: int) -> None:
        """A forward uses the unit."""
        self._uses.append(unit)
        if len(self._uses) > USES_MAX:  # parts of the model are called alone, and no forward begins
            count = len(self._uses) - USES_MAX // 2
            del self._uses[:count]
            self._starts = [max(start - count, 0) for start in self._starts]
            self._position = None if self._position is None else max(self._position - count, 0)

    def end_use(self, unit: int) -> None:
        """The use of `unit` is over. If it enclosed other uses, backward needs the unit before theirs."""
        if self._uses and self._uses[-1] != unit and unit in self._uses:
            last = len(self._uses) - 1 - self._uses[::-1].index(unit)
            if last >= (self._starts[-1] if self._starts else 0):
                self._uses.append(self._uses.pop(last))

    def use(self, unit: int, *, recomputes: bool) -> bool:
        """The backward uses the unit: gradients have reached it, or it is recomputed. False: no forward has used it."""
        if unit in self._jumped_over:
            if recomputes:
                self._first_of[self._symbol(self._part[-1])] = self._symbol(self._part[0])
                self._jumped_over.remove(unit)
                return True
            # What seemed to be a jump was one use out of order: the units between are used in reverse order.
            self._go_to(self._limit + len(self._part))
        if unit in self._to_pass:  # a part inside the part may be recomputed again, before gradients pass it
            if not recomputes:
                self._to_pass.remove(unit)
            return True
        limit = self._limit
        for index in range(limit - 1, -1, -1):
            if self._uses[index] == unit:
                self._go_to(index, self._uses[index:limit] if recomputes else [])
                if index == limit - 1:
                    self._first_of.pop(self._symbol(unit), None)
                return True
        if recomputes:
            self._to_pass.insert(0, unit)
        return False

    def _go_to(self, position: int | None, part: Sequence[int] = ()) -> None:
        self._position, self._part = position, [*part]
        self._jumped_over, self._to_pass = self._part[1:], self._part[::-1]

    def end_backward_use(self, unit: int) -> None:
        """Gradients have passed the unit."""
        if unit in self._to_pass:
            self._to_pass.remove(unit)

    def restart(self) -> None:
        """No backward runs."""
        self._go_to(None)

    def end_backward(self) -> None:
        """A backward is over. Its graph may have been retained, so its forward is remembered until the next forward."""
        self.restart()
        self._had_backward = True

    def forget_forwards(self) -> None:
        """Forget the forwards so far: they have had their backward, or never will."""
        self._uses, self._starts = [], []
        self._had_backward = False
        self.restart()

    def upcoming(self) -> Iterator[int]:
        """Units in the order of their use from here to the end of the backward."""
        yield from self._jumped_over
        yield from self._to_pass
        limit = self._limit
        while limit:
            begin = self._begin_of_part(limit) if self._first_of else limit - 1
            yield from self._uses[begin:limit]
            if limit - begin > 1:
                yield from reversed(self._uses[begin:limit])
            limit = begin

    @property
    def _limit(self) -> int:
        return len(self._uses) if self._position is None else self._position

    def _begin_of_part(self, limit: int) -> int:
        first = self._first_of.get(self._symbol(self._uses[limit - 1]))
        if first is not None:
            for index in range(limit - 1, -1, -1):
                if self._symbol(self._uses[index]) == first:
                    return index
        return limit - 1
