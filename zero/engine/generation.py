"""`engine.generation()`: a model that generates keeps what fits on the device from token to token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero.assembly.run import Run
from zero.assembly.steps import Steps


class Generation:
    def __init__(self, run: Run, steps: Steps) -> None:
        self._run, self._steps = run, steps

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
        run = self._run
        self._steps.ready_to_run("generation")
        if not run.generations:
            run.parts.coordinator.begin_generation()
        run.generations += 1
        try:
            yield
        except BaseException:
            run.parts.hooks.reset()  # torch calls no hooks for an interrupt: uses would stay open for ever
            raise
        finally:
            run.generations -= 1
            if not run.generations:
                run.parts.coordinator.end_generation()
