"""Gradient accumulation: which backward is the last one before a step, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.errors import StateError
from zero.assembly.run import Run


class Accumulation:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._boundary: bool | None = None
        self.inside_no_sync = False
        self._buffers_differ = False  # Buffers may differ between ranks since the last training forward.

    @property
    def micro_steps(self) -> int:
        """See `ZeroEngine.micro_steps`."""
        return self._run.micro_steps

    @micro_steps.setter
    def micro_steps(self, number: int) -> None:
        run = self._run
        run.micro_steps = number
        run.step_began = run.collecting_began = number - number % run.config.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """See `ZeroEngine.is_gradient_accumulation_boundary`."""
        config = self._run.config
        if self._boundary is not None:
            return self._boundary
        if not config.managed_gradient_accumulation:
            return True
        return self.micro_step_index + 1 >= config.gradient_accumulation_steps

    @property
    def micro_step_index(self) -> int:
        """Calls of `step()` since the current step began. No remainder: the number of micro-batches may change."""
        return self._run.micro_steps - self._run.step_began

    @property
    def collected_micro_batches(self) -> int:
        """Micro-batches of the current step whose gradients are kept; at least 1 if there are any."""
        run = self._run
        counted = run.micro_steps - run.collecting_began if run.config.managed_gradient_accumulation else 0
        return max(counted, int(run.parts.has_gradients))

    def begin_step(self) -> None:
        """The next micro-batch is the first of a step."""
        self._run.step_began = self._run.collecting_began = self._run.micro_steps

    def restart_collection(self) -> None:
        """Note that the gradients collected so far are discarded; the position in the current step stays."""
        self._run.collecting_began = self._run.micro_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """See `ZeroEngine.set_gradient_accumulation_boundary`."""
        self._boundary = is_boundary

    def should_reduce(self) -> bool:
        """True if gradients of the running backward are to be reduced as soon as possible."""
        return self.is_gradient_accumulation_boundary() and not self.inside_no_sync

    def begin_batch(self, what: str) -> None:
        """Begin a step whose micro-batches all follow. Raises StateError: backward has run for some of them."""
        run = self._run
        # A gradient beside a batch of one micro-batch, of a penalty for example, is added to the batch's.
        single_call = run.config.gradient_accumulation_steps == 1 and not self.micro_step_index
        # A backward was interrupted on one of several ranks: all of them refuse the step together.
        agreed = run.parts.backward_watch.is_torn and not run.parts.collectives.placement.is_single_rank
        if self.collected_micro_batches and not single_call and not agreed:
            raise StateError(
                f"{what}: {self.collected_micro_batches} micro-batches of this step have already been run one by one "
                "with forward and backward; run the rest of them in the same way, or call zero_grad() to discard them"
            )
        self.begin_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `ZeroEngine.no_sync`."""
        before, self.inside_no_sync = self.inside_no_sync, True
        try:
            yield
        finally:
            self.inside_no_sync = before

    def share_buffers(self) -> None:
        """Before a forward: take the first rank's buffers (running statistics), as DistributedDataParallel does."""
        if self._run.module.training and torch.is_grad_enabled():
            if self._buffers_differ:
                self._run.parts.buffers.broadcast()
            self._buffers_differ = not self.inside_no_sync

    def mark_buffers_different(self) -> None:
        """Note that each rank has its own buffers now."""
        self._buffers_differ = True
