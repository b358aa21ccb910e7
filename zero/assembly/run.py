"""The state that the collaborators of one engine share: model, configuration, optimizer, parts and counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zero.assembly.engine_parts import EngineParts, RunInputs
from zero.assembly.tracing import Tracer
from zero.config import Config
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.optim.loss_scale import LossScaler
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import Rules
from zero.store.collectives import Collectives
from zero.store.saved_tensors import Activations
from zero.store.storage import Storage


class Run(RunInputs):
    """One engine's model, configuration, optimizer, counters and parts.

    Args:
        rules: how parameters are updated.
        updater: the optimizer that users hold; None trains nothing.
        scaler: the loss scaler; its scale is 1 if nothing is fp16.

    Attributes:
        parts: the engine's parts for the present model.
        in_place: values in memory that the device can address are used there, without a copy.
        global_steps: steps taken, including skipped ones.
        global_samples: samples that steps have used, over all ranks.
        micro_steps: calls of `step()`.
        step_began: `micro_steps` when the current step began.
        collecting_began: `micro_steps` when its gradients were last discarded, else as `step_began`.
        skipped_steps: steps that changed no weight because a gradient was inf or NaN.
        lr_scheduler: stepped after each step that changes weights, or None.
        collate_fn: for loaders that get none.
        training_dataloader: checkpoints save its position if it has `state_dict` and `load_state_dict`.
        attention_logits: the `QkClip`, whose logits since the last step checkpoints save; or None.
        data_position: `state_dict` of that loader in the checkpoint that was loaded last.
        generations: number of open contexts of `engine.generation()`.
        closed: the engine is closed.
    """

    parts: EngineParts
    tracer: Tracer

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: torch.device,
        rules: Rules,
        updater: ZeroOptimizer | None,
        scaler: LossScaler,
        *,
        generations: int,
    ) -> None:
        super().__init__(model, config, device, rules, updater, scaler)
        self.activations = Activations(config.activation_checkpointing)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.step_began = self.collecting_began = 0
        self.lr_scheduler: Any = None
        self.collate_fn: Callable[..., Any] | None = None
        self.training_dataloader: DataLoader[Any] | None = None
        self.attention_logits: Any = None
        self.data_position: Any = None
        self.generations = generations
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.closed = False

    @property
    def collectives(self) -> Collectives:
        return self.parts.collectives

    def set_parts(self, parts: EngineParts) -> None:
        first = self._finalizer is None
        self.detach_finalizer()
        # Users of DeepSpeed rarely close an engine: the finalizer releases files and threads of a dropped one too.
        self._finalizer = weakref.finalize(self, Storage.abandon, parts.storage)
        self.parts = parts
        if first:
            self.tracer = Tracer(parts.storage)
        else:
            self.tracer.set_storage(parts.storage)
        self.activations.attach(parts.storage.activations, parts.model, parts.bindings, parts.backward_watch)
        if self.generations:
            parts.coordinator.begin_generation()

    @contextmanager
    def calling_model(self) -> Iterator[None]:
        """Context around calls of the model: if they are aborted, no unit is in use any more.

        torch calls no hooks after an interrupt: units would count as in use for ever.
        """
        try:
            yield
        except BaseException as error:
            if not self.closed:
                self.parts.scheduler.fail(error)
                self.parts.hooks.reset()
            raise

    def detach_finalizer(self) -> None:
        """Detach the finalizer. The caller closes the parts' storage."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def set_batch(self, train: int, micro: int, steps: int) -> None:
        """Change the batch sizes: samples per step, samples per forward of a rank, micro-batches per step."""
        self.config = self.config.with_batch({TRAIN: train, MICRO: micro, STEPS: steps})
