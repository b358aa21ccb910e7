"""Micro-steps: which backward is the last one before a step, and whether gradients are reduced meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.values.parameters import ParameterValues


class Accumulates:
    """Mixed into the engine."""

    micro_steps: int
    updater: Any
    _config: Config
    _index_of: dict[int, int]
    module: nn.Module
    _parts: Any
    _boundary: bool | None = None
    _local_only = False
    _buffers_differ = False
    """Between ranks, since the last forward that trained."""

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """Of one parameter; the engine's."""
        raise NotImplementedError

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next `step()` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self._config.managed_gradient_accumulation:
            return True
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

    def _share_buffers(self) -> None:
        """Running statistics are the first rank's, as with DistributedDataParallel."""
        if self.module.training and torch.is_grad_enabled():
            if self._buffers_differ:
                self._parts.buffers.share()
            self._buffers_differ = not self._local_only

    def _take_written(self) -> None:
        """A gradient that somebody has put into `parameter.grad` replaces what was collected, as with torch.

        Of several ranks each has put the same there: this rank's slice is taken from its own.
        """
        for parameter in self._written():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                self.values_of(parameter, to_change=True).set_gradient(whole)

    def _forget_written(self) -> None:
        for parameter in self._written():
            parameter.grad = None

    def _written(self) -> list[nn.Parameter]:
        """Backward leaves none: gradients are collected as they come."""
        groups = self.updater.param_groups if self.updater is not None else []
        with torch._C.DisableTorchFunctionSubclass():
            return [p for group in groups for p in group["params"] if p.grad is not None and id(p) in self._index_of]
