"""Hooks of torch's optimizers around a step: the engine's optimizer's, those of the one handed over, and global ones.

torch calls them where `optimizer.step()` is called. A step of the engine is the same step whoever asks for it, so they
are called once each, however it was asked for: the first before it is decided, with the gradients there to be read or
replaced (`safe_get_full_grad`), also where the step turns out to be skipped; the others after a step that was taken,
and after the schedule that the engine steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torchs

PRE, POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


class CallsHooks:
    """Mixed into the optimizer.

    Attributes:
        given: the optimizer object that was handed over, if one was.
    """

    given: torch.optim.Optimizer | None = None

    def before_step(self) -> None:
        """A step was asked for; what hooks change in param groups and gradients counts."""
        self._call([(self, hook) for hook in torchs._global_optimizer_pre_hooks.values()] + self._hooks(PRE))

    def after_step(self) -> None:
        """It was taken."""
        self._call(self._hooks(POST) + [(self, hook) for hook in torchs._global_optimizer_post_hooks.values()])

    def _hooks(self, kind: str) -> list[tuple[Any, Any]]:
        optimizers = [self] if self.given is None else [self, self.given]
        return [(each, hook) for each in optimizers for hook in getattr(each, kind, {}).values()]

    def _call(self, hooks: list[tuple[Any, Any]]) -> None:
        for optimizer, hook in hooks:
            hook(optimizer, (), {})
