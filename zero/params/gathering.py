"""Whole values outside forward and backward: `GatheredParameters`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn

from offload.array.saved_views import UnmovedTensor
from offload.system.interrupts import atomic, deferring_interrupts
from zero.params.initial_store import broadcast_values, check_modifier_rank, is_in_memory_init
from zero.params.released_parameter import ParameterStore, is_managed, store_of

_open_contexts: list[GatheredParameters] = []
"""Open contexts that have saved-tensor hooks."""


def _save_tensor(tensor: torch.Tensor) -> UnmovedTensor:
    """Save a tensor for backward; as a copy, if its values are released before (a penalty on a weight needs this)."""
    return UnmovedTensor.from_tensor(
        tensor.detach().clone() if any(context.frees_on_exit(tensor) for context in _open_contexts) else tensor
    )


class GatheredParameters:
    """Inside the context the parameters have their whole values; edits are kept.

    Args:
        params: a parameter, or any iterable of them (lists, generators; duplicates are fine).
            Parameters that belong to no engine and no `Init` are left alone.
        modifier_rank: the rank whose edits are kept; None: all ranks make the same edits, which are kept. Every rank
            enters and leaves the context, with the same parameters. Before there is an engine, None lets each rank keep
            its own edits.
        fwd_module: accepted and ignored.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        candidates = [params] if isinstance(params, nn.Parameter) else list(params)
        unique = {id(p): p for p in candidates if enabled and is_managed(p)}
        self._by_store: dict[int, tuple[ParameterStore, list[nn.Parameter]]] = {}
        for parameter in unique.values():
            store = store_of(parameter)
            self._by_store.setdefault(id(store), (store, []))[1].append(parameter)
        self._in_memory = list({id(p): p for p in candidates if enabled and is_in_memory_init(p)}.values())
        self._modifier_rank = modifier_rank
        self._active: list[tuple[ParameterStore, list[nn.Parameter]]] = []
        self._saved_tensor_hooks = ExitStack()

    def frees_on_exit(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` shares values that are released when the context ends and are not fetched for backward."""
        if tensor.layout != torch.strided:
            return False
        pairs = ((store, p) for store, parameters in self._active if not store.keeps_saved_tensors for p in parameters)
        return any(store.shares_memory(p, tensor) for store, p in pairs)

    def __enter__(self) -> None:
        """Fetch the values: all of them, or none and an error."""
        if self._in_memory or self._by_store:
            check_modifier_rank(self._modifier_rank)
        try:
            with deferring_interrupts:
                for store, parameters in self._by_store.values():
                    store.begin_gather(parameters)
                    self._active.append((store, parameters))
            if torch.is_grad_enabled() and not all(store.keeps_saved_tensors for store, _ in self._active):
                self._copy_saved_tensors()
        except BaseException:
            self._saved_tensor_hooks.close()
            self._end_all()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store the edits, then release."""
        self._saved_tensor_hooks.close()
        self._end_all()
        if kind is None and self._modifier_rank is not None:
            broadcast_values(self._modifier_rank, [p for p in self._in_memory if is_in_memory_init(p)])

    def _copy_saved_tensors(self) -> None:
        """Have autograd save copies in this thread until the context ends, unless saved-tensor hooks are disabled."""
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            _open_contexts.append(self)
            self._saved_tensor_hooks.callback(_open_contexts.remove, self)
            self._saved_tensor_hooks.enter_context(
                torch.autograd.graph.saved_tensors_hooks(_save_tensor, UnmovedTensor.restore)
            )

    @atomic
    def _end_all(self) -> None:
        """End every store's gather, even if one of them raises; the first error is raised at the end."""
        first: BaseException | None = None
        while self._active:
            store, parameters = self._active.pop()
            if not any(is_managed(p) and store_of(p) is store for p in parameters):
                continue  # its engine has unwrapped the model and is closed
            try:
                store.end_gather(parameters, self._modifier_rank)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
