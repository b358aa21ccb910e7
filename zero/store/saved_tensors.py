"""Puts tensors that autograd saves in a forward into the engine's store, except parameters and buffers.

[Note: whose hooks] Autograd calls only the innermost saved-tensor hooks. Inside a non-reentrant checkpoint these are
the checkpoint's own hooks, which store nothing; our hooks get its inputs, which it saves before. Inside a reentrant
checkpoint nothing is saved. So one pair of hooks around a checkpoint stores its inputs. The same pair around a whole
forward stores these inputs and all tensors that are saved outside of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import nn

from offload.array.activations import ActivationStore, Handle
from offload.array.saved_views import UnmovedTensor, storage_key
from offload.errors import StorageError
from offload.sizes import PAGE_BYTES, align_up
from offload.system.interrupts import atomic
from zero.config.machine_block import ActivationCheckpointing
from zero.params.binding import UnitBinding


class RunningBackward(Protocol):
    """The backward that reads saved tensors."""

    def mark_torn(self) -> None:
        """It cannot get something it needs: the gradients it has not reached will be missing."""


class Activations:
    """The saved tensors of one model.

    Args:
        settings: the settings that the plan was made with.

    Attributes:
        store: of the tensors; None: they stay where they are.
    """

    def __init__(self, settings: ActivationCheckpointing, store: ActivationStore | None = None) -> None:
        self.settings, self.store = settings, store
        self._model: nn.Module | None = None
        self._bindings: Sequence[UnitBinding] = ()
        self._unmoved_keys: frozenset[int] = frozenset()
        self._backward: RunningBackward | None = None
        self._has_added_room = False

    def attach(
        self,
        store: ActivationStore | None,
        model: nn.Module,
        bindings: Sequence[UnitBinding],
        backward: RunningBackward,
    ) -> None:
        """Use `store` for tensors from now on.

        Args:
            model: its buffers stay where they are.
            bindings: their parameters stay where they are.
            backward: it is torn if a tensor cannot be read inside it.
        """
        self.store, self._model, self._backward = store, model, backward
        self._bindings = bindings
        self._has_added_room = False

    def close(self) -> None:
        """The engine is closed: reset its settings and drop its store."""
        self.settings, self.store = ActivationCheckpointing(), None

    @contextmanager
    def forward(self) -> Iterator[None]:
        with use_activations(self):
            self._find_unmoved()
            with self.offload_saved_tensors() if self.settings.activation_offloading else nullcontext():
                yield

    @contextmanager
    def offload_saved_tensors(self) -> Iterator[None]:
        if self.store is None or not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def check_stores(self) -> None:
        """Raise StorageError, once, if a tensor could not be stored; it stays in memory, and the next call goes on."""
        if self.store is not None:
            self.store.check_failure()

    def _find_unmoved(self) -> None:
        """Note what stays where it is. The keys are valid while a forward runs."""
        if self.store is not None and self._model is not None:
            flats = frozenset(storage_key(unit.flat) for unit in self._bindings)
            buffers = (buffer for buffer in self._model.buffers() if buffer.layout == torch.strided)
            self._unmoved_keys = flats.union(map(storage_key, buffers))

    @atomic
    def _pack(self, tensor: torch.Tensor) -> Handle | UnmovedTensor:
        store = self.store
        if store is None or not store.can_save(tensor) or storage_key(tensor) in self._unmoved_keys:
            return UnmovedTensor.from_tensor(tensor)
        if not self._has_added_room:
            self._has_added_room = True
            if self.settings.contiguous_memory_optimization and self.settings.number_checkpoints:
                each_bytes = align_up(tensor.untyped_storage().nbytes(), PAGE_BYTES)
                store.grow_memory(self.settings.number_checkpoints * each_bytes)
        return store.save(tensor)

    @atomic
    def _unpack(self, packed: Handle | UnmovedTensor) -> torch.Tensor:
        try:
            return packed.restore()
        except StorageError:
            if self._backward is not None:
                self._backward.mark_torn()
            raise


_current: ContextVar[Activations | None] = ContextVar("zero_activations", default=None)


def current_activations() -> Activations | None:
    """The `Activations` of the engine whose forward runs, or of the checkpoint that is being recomputed."""
    return _current.get()


@contextmanager
def use_activations(activations: Activations | None) -> Iterator[None]:
    token = _current.set(activations)
    try:
        yield
    finally:
        _current.reset(token)
