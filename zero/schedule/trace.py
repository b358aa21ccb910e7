"""What was used after what, so that the next use can be foretold.

Forward order is learnt: a table from the last two uses to the uses that followed them, one per
phase. Backward order is not guessed: it is the reverse of the forward that ran. A wrong guess costs
one miss; nothing is flushed.
"""

from __future__ import annotations

from collections.abc import Iterator

START = -1
"""Stands for "before the first use" of a forward."""
END = -2
"""Stands for "the forward is over"."""

FORWARDS_MAX = 16
"""Forwards remembered for their backward; older ones cost a miss per unit if their backward comes after all."""

GENERATE = "generate"
"""The phase in which forward follows forward."""

Key = tuple[int, int]


class Trace:
    """Successors of uses, per phase ("train", "eval", "generate"); units are ints."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, list[int]]] = {}
        self._phase = "train"
        self._key: Key = (START, START)
        self._forward: list[int] = []
        self._position: int | None = None
        self._consumed = False
        self._starts: list[int] = []
        """Where in `_forward` each forward begins."""

    def begin_forward(self, phase: str) -> None:
        """A forward of the model begins."""
        self._phase, self._key, self._position = phase, (START, START), None
        if self._consumed:
            self.forget_forwards()
        self._starts.append(len(self._forward))
        if len(self._starts) > FORWARDS_MAX:
            # Forwards whose backward never comes (an evaluation without no_grad, say).
            oldest = self._starts[1]
            self._forward = self._forward[oldest:]
            self._starts = [start - oldest for start in self._starts[1:]]

    def expect_forward(self, phase: str) -> None:
        """A forward of the model is expected; nothing of it has begun."""
        self._phase, self._key, self._position = phase, (START, START), None

    def use_forward(self, unit: int, *, backward_follows: bool) -> None:
        """`unit` is used in forward now; with `backward_follows` its backward is expected too."""
        self._learn(unit)
        if backward_follows:
            self._forward.append(unit)

    def end_forward(self) -> None:
        """The forward is over."""
        self._learn(END)

    def use_backward(self, unit: int) -> None:
        """`unit` is used in backward now: the last forward use of it before the present position."""
        limit = len(self._forward) if self._position is None else self._position
        for index in range(limit - 1, -1, -1):
            if self._forward[index] == unit:
                self._position = index
                return

    def end_backward(self) -> None:
        """A backward is over. Its graph may have been retained, so its forward is kept until the next one."""
        self._position = None
        self._consumed = True

    def forget_forwards(self) -> None:
        """The forwards so far have had their backward, or never will."""
        self._forward = []
        self._starts = []
        self._position = None
        self._consumed = False

    def upcoming_in_forward(self, *, with_backward: bool) -> Iterator[int]:
        """Units in the order of their predicted use, from now on; at a fork every known successor.

        With `with_backward`, the reverse of the forward (as far as it ran or is predicted) follows. While a model
        generates, the next forward follows.
        """
        table = self._tables.get(self._phase, {})
        key, predicted, seen = self._key, [], {self._key}
        again = self._phase == GENERATE
        while successors := table.get(key):
            likely = successors[-1]
            for other in successors[:-1]:
                if other != END:
                    yield other
            if likely == END and not again:
                break
            if likely == END:
                again, key = False, (START, START)
            else:
                predicted.append(likely)
                yield likely
                key = (key[1], likely)
            if key in seen:
                break  # the path repeats itself; further steps would only loop
            seen.add(key)
        if with_backward:
            yield from reversed(predicted)
            yield from reversed(self._forward)

    def upcoming_in_backward(self, *, forward_follows: bool) -> Iterator[int]:
        """Units in the order of their use in the rest of this backward.

        With `forward_follows` (accumulation: the weights stay as they are) the next forward's start follows.
        """
        limit = len(self._forward) if self._position is None else self._position
        yield from reversed(self._forward[:limit])
        if forward_follows:
            key: Key = (START, START)
            table, steps = self._tables.get("train", {}), 0
            while (successors := table.get(key)) and successors[-1] != END and steps < 64:
                yield successors[-1]
                key, steps = (key[1], successors[-1]), steps + 1

    def _learn(self, unit: int) -> None:
        successors = self._tables.setdefault(self._phase, {}).setdefault(self._key, [])
        if unit in successors:
            successors.remove(unit)
        successors.append(unit)  # the most recent one last
        self._key = (self._key[1], unit)
