"""The end of an engine under DeepSpeed's name, after which some models go on."""

from __future__ import annotations

from zero.exchange.exchange import Exchange
from zero.values.access import EngineKeeper


class Ends:
    """Mixed into the engine."""

    _closed: bool
    _keeper: EngineKeeper
    exchange: Exchange

    def close(self) -> None:
        """Give everything back; the engine's."""
        raise NotImplementedError

    def destroy(self) -> None:
        """As `close`, but a model that is not cut among the ranks keeps its weights, as with DeepSpeed. Idempotent.

        That is stages 0 to 2, where every rank has all of them: clients free memory so, and prepare the model again.
        All ranks call it together.
        """
        whole = not (self._closed or self.exchange.placement.weights_sharded)
        try:
            if whole:
                self._keeper.give_back()
        finally:
            self.close()
