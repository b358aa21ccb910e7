"""Micro-steps: which backward is the last one before a step, and whether gradients are reduced meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero.config import Config


class Accumulates:
    """Mixed into the engine."""

    micro_steps: int
    _config: Config
    _boundary: bool | None = None
    _local_only = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next `step()` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so from outside; from then on the micro-step counter decides nothing."""
        self._boundary = is_boundary

    def reduces(self) -> bool:
        """True when gradients of the backward under way are to be reduced as soon as they can be."""
        return self.is_gradient_accumulation_boundary() and not self._local_only

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside need not reduce gradients: stages 0 and 1 add them up on each rank until later.

        Stages 2 and 3 have no room for whole gradients: they go on reducing, and the numbers are the same.
        """
        before, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = before
