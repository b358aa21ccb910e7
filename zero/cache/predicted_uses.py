"""The uses that are likely to follow in a forward: a prediction that is valid for more than one use.

A forward of a model of experts has thousands of uses, and each of them needs to know what follows. The prediction is
looked up once. While each use is the one that was predicted, the prediction only moves on by one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

START = -1  # Means "before the first use" of a forward.
END = -2  # Means "the forward is over".

Key = tuple[int, int]  # The last two symbols: a unit, or a number that stands for all siblings (routing.py).


@dataclass(slots=True)
class PredictedUses:
    """Attributes:
    symbols: what is likely to be used, in order; END is among them if another forward follows.
    alternatives: position in `symbols` -> what else has followed there; it may be the position after the last.
    is_cyclic: the table leads back to where it has been: the prediction ends early, and `advance` is never true.
    """

    symbols: list[int] = field(default_factory=list)
    alternatives: dict[int, list[int]] = field(default_factory=dict)
    is_cyclic: bool = False
    _position: int = 0

    @classmethod
    def find(
        cls, key: Key, table: Mapping[Key, list[int]], choose: Callable[[Key, list[int]], int], *, repeats: bool = False
    ) -> PredictedUses:
        """The prediction from `key` on.

        Args:
            table: key -> what has followed it, the most recent one last.
            choose: chooses among what has followed a key.
            repeats: the next forward is a part of the prediction.
        """
        prediction = cls()
        symbols, visited = prediction.symbols, {key}
        while successors := table.get(key):
            symbol = choose(key, successors)
            if len(successors) > 1:
                prediction.alternatives[len(symbols)] = [other for other in successors if other not in (symbol, END)]
            if symbol == END and not repeats:
                break
            symbols.append(symbol)
            if symbol == END:
                repeats, key = False, (START, START)
                visited.clear()
            else:
                key = (key[1], symbol)
            if key in visited:
                prediction.is_cyclic = True
                break
            visited.add(key)
        return prediction

    def advance(self, symbol: int) -> bool:
        """`symbol` is used now. False: it was not expected, and what follows is not known here."""
        if self.is_cyclic or self._position >= len(self.symbols) or self.symbols[self._position] != symbol:
            return False
        self._position += 1
        return True

    def upcoming(self) -> Iterator[int]:
        """What may follow: at each place the likely symbol, then the others."""
        if not self.alternatives:
            yield from self.symbols[self._position :]
            return
        for position in range(self._position, len(self.symbols) + 1):
            yield from self.symbols[position : position + 1]
            yield from self.alternatives.get(position, ())

    def likely(self) -> list[int]:
        """What is likely to follow, in order."""
        return self.symbols[self._position :]
