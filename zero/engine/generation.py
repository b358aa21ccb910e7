"""`engine.generation()`: a model that generates keeps what fits on the device from token to token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero.schedule.coordinator import Coordinator
from zero.schedule.hooks import ModuleHooks


class Generates:
    """Mixed into the engine, which sets `_coordinator` and `_hooks`."""

    _coordinator: Coordinator
    _hooks: ModuleHooks
    _generations = 0

    def ready_to_run(self, what: str) -> None:
        """Raise if the engine is closed; the engine's."""
        raise NotImplementedError

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Inside, forwards follow each other with the same weights: `model.generate(...)`, or a loop of your own.

        As many units as `stage3_max_live_parameters` (by default what `memory_budget.device` allows) has room for
        are fetched once and stay; the rest is streamed for each token, the next token's first units while the last
        ones of this are in use. When all fit, a token after the first fetches nothing. At the end they are let go.
        Results are the same inside and outside; nothing else of the engine changes, and training goes on as if
        nothing had been generated. May be nested; a `step()` inside lets go of what was kept, as its values change.

        Raises:
            StateError: the engine is closed.
            StorageError: the last step could not be completed.
        """
        self.ready_to_run("generation")
        if not self._generations:
            self._coordinator.begin_generation()
        self._generations += 1
        try:
            yield
        except BaseException:
            self._hooks.reset()  # torch calls no hooks for an interrupt: uses would stay open for ever
            raise
        finally:
            self._generations -= 1
            if not self._generations:
                self._coordinator.end_generation()
