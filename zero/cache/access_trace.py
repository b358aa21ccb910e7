"""Records the order in which units are used, and predicts the next uses.

Forward order is learnt in one table per phase: from the last two uses to the uses that followed them. If several uses
have followed, the likely one is the one that came after the same choice last time. So alternating branches are
predicted as well as a branch that is always taken. If a forward uses only some siblings (experts), they are one symbol
in the table: so the use after them is predicted, whichever of them were used (routing.py). Backward order is not
guessed: it is the reverse of the order in which the forward's uses ended. A wrong guess costs one miss; nothing is
flushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zero.cache.backward_order import USES_MAX, BackwardOrder
from zero.cache.predicted_uses import END, START, Key, PredictedUses
from zero.cache.routing import Routing

GENERATE = "generate"  # The phase in which a forward is followed by another forward.


class AccessTrace:
    """Successors of uses, per phase ("train", "eval", "generate"); units are ints.

    `group_of`: unit -> its group of siblings; None: no unit has any.
    """

    def __init__(self, group_of: Mapping[int, int] | None = None) -> None:
        self._routing = Routing(group_of or {})
        self._uses: list[int] = []  # Uses of the running forward, or of the last one.
        self._tables: dict[str, dict[Key, list[int]]] = {}
        # (phase, key, what followed) -> what followed next time.
        self._next_choice: dict[tuple[str, Key, int], int] = {}
        # Units that a backward has used although no forward with gradients used them: reentrant checkpointing.
        self._recomputed_units: set[int] = set()
        self._backward_follows = True
        self._phase = "train"
        self._key: Key = (START, START)
        self._prediction: PredictedUses | None = None  # What follows `_key`; None: not computed yet.
        self._next_forward: PredictedUses | None = None  # The next forward while a backward runs, likewise.
        self.prediction_changes = 0  # Changes of the prediction, other than that its first uses have come.
        self._backward = BackwardOrder(self._routing.symbol)

    def begin_forward(self, phase: str, *, backward_follows: bool = True) -> None:
        """A forward of the model begins; `backward_follows` is true unless gradients are off for all of it."""
        self._backward_follows = backward_follows
        self.expect_forward(phase)
        self._uses = []
        self._backward.begin_forward()

    def expect_forward(self, phase: str) -> None:
        """A forward of the model is expected; it has not begun."""
        self._phase, self._key = phase, (START, START)
        self._drop_prediction()
        self._backward.restart()
        self._routing.begin_forward()

    def use_forward(self, unit: int, *, backward_follows: bool) -> None:
        """`unit` is used in forward now; with `backward_follows` its backward is expected too."""
        self._uses.append(unit)
        self._routing.use(unit)
        self._learn(unit)
        if self.expects_backward(unit, backward_follows):
            self._backward.append_use(unit)
        if len(self._uses) > USES_MAX:  # parts of the model are called alone, and no forward ends
            del self._uses[: -USES_MAX // 2]

    def expects_backward(self, unit: int, backward_follows: bool) -> bool:
        """True if a backward will use the unit too: it may recompute what runs without gradients now."""
        return backward_follows or (self._backward_follows and unit in self._recomputed_units)

    def end_use(self, unit: int) -> None:
        """The use of `unit` is over."""
        self._backward.end_use(unit)

    def end_forward(self) -> None:
        changed = self._routing.end_forward(self._phase)
        self._drop_prediction()
        if not changed:
            self._learn(END)
            return
        self._next_choice = {
            choice: unit for choice, unit in self._next_choice.items() if not changed.intersection((*choice[1], unit))
        }
        for table in self._tables.values():
            for key in [key for key in table if changed.intersection(key)]:
                del table[key]
            for successors in table.values():
                successors[:] = [unit for unit in successors if unit not in changed]
        self._key = (START, START)
        for unit in (*self._uses, END):  # learn this forward again, with the new symbols
            self._learn(unit)

    def use_backward(self, unit: int, *, recomputes: bool = False) -> None:
        """`unit` is used in backward now: gradients have reached it, or a forward inside the backward uses it."""
        if not self._backward.use(unit, recomputes=recomputes):
            self._recomputed_units.add(unit)

    def end_backward_use(self, unit: int) -> None:
        """Gradients have passed `unit`."""
        self._backward.end_backward_use(unit)

    def end_backward(self) -> None:
        self._backward.end_backward()
        self.prediction_changes += 1

    def forget_forwards(self) -> None:
        """Forget the forwards so far: they have had their backward, or never will."""
        self._backward.forget_forwards()

    def upcoming_in_forward(self, *, with_backward: bool, to_fetch: bool = False) -> Iterator[int]:
        """Units in the order of their predicted use, from now on; at a fork every known successor.

        Args:
            with_backward: the reverse of the forward (as far as it ran or is predicted) follows. While a model
                generates, the next forward follows.
            to_fetch: the result is used for prefetch. Then the backward is left out if experts that we cannot predict
                come before it: they will need the room.
        """
        phase, symbol = self._phase, self._key[1]
        if self._prediction is None:
            self._prediction = self._predict(phase, self._key)
        prediction, routing = self._prediction, self._routing
        now = routing.units(symbol, phase) if routing.is_routed(symbol) else ()
        yield from now
        yield from self._units(prediction.upcoming(), phase)
        likely = prediction.likely() if with_backward else []
        is_unpredictable = (
            with_backward and to_fetch and any(routing.is_unpredictable(place, phase) for place in (symbol, *likely))
        )
        if with_backward and not is_unpredictable:
            yield from reversed([*now, *self._units(likely, phase)])
            yield from self._backward.upcoming()

    def upcoming_in_backward(self, *, forward_follows: bool) -> Iterator[int]:
        """Units in the order of their use from here to the end of this backward.

        With `forward_follows` (accumulation: the weights stay as they are) the next forward's start follows.
        """
        yield from self._backward.upcoming()
        if forward_follows:
            if self._next_forward is None:
                self._next_forward = self._predict("train", (START, START))
            yield from self._units(self._next_forward.likely(), "train")

    def _predict(self, phase: str, key: Key) -> PredictedUses:
        def choose(key: Key, successors: list[int]) -> int:
            return self._next_choice.get((phase, key, successors[-1]), successors[-1])

        return PredictedUses.find(key, self._tables.get(phase, {}), choose, repeats=phase == GENERATE)

    def _units(self, symbols: Iterable[int], phase: str) -> Iterator[int]:
        """The units that are worth fetching for these symbols."""
        routing = self._routing
        for symbol in symbols:
            if symbol >= 0:
                yield symbol
            elif routing.is_routed(symbol):
                yield from routing.units(symbol, phase)

    def _drop_prediction(self) -> None:
        self._prediction = self._next_forward = None
        self.prediction_changes += 1

    def _learn(self, unit: int) -> None:
        symbol = self._routing.symbol(unit)
        if symbol == self._key[1] and self._routing.is_routed(symbol):
            return  # another unit of the same siblings
        successors = self._tables.setdefault(self._phase, {}).setdefault(self._key, [])
        # The prediction of a generation contains this place again, in the next forward.
        as_known = self._phase != GENERATE or successors[-1:] == [symbol]
        if successors and unit != END:  # not for END: the forward may have been aborted here
            self._next_choice[self._phase, self._key, successors[-1]] = symbol
        if symbol in successors:
            successors.remove(symbol)
        successors.append(symbol)  # the most recent one last
        # Beyond experts that we could not predict nothing was predicted.
        self.prediction_changes += self._routing.is_unpredictable(self._key[1], self._phase)
        self._key = (self._key[1], symbol)
        self._next_forward = None
        if not (as_known and self._prediction is not None and self._prediction.advance(symbol)):
            self._drop_prediction()
