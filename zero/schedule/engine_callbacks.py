"""Calls from the parts of an engine up to the engine: one object, made once and passed to all parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCallbacks:
    """The only way in which parts call their engine. Parts that replace others get the same object."""

    check_open: Callable[[str], None]  # Raises StateError if the engine is closed; the argument names the operation.
    # `check_open`; on return weights are there and persistent units are bound.
    make_ready_to_run: Callable[[str], None]
    on_module_call: Callable[[], None]  # A module is called by itself: on return weights are on the device.
    take_user_gradients: Callable[[], None]  # Gradients that user code has put into `.grad` replace the collected ones.
    on_backward_begin: Callable[[], None]  # On return everything that a backward needs is on the device.
    has_offloaded_states: Callable[[], bool]  # `offload_states` has moved something away; no update is due.
    # (what, units=None): StateError if the engine is closed; else these units (None: all) have the last step's values.
    complete_updates: Callable[..., None]
    on_weights_change: Callable[[int], None]  # A unit changes by other means than a step.
    on_forward_modify: Callable[[int], None]  # A forward has changed a unit in place.
    on_edit_begin: Callable[[], None]  # Weights may be edited: on return no checkpoint is being written.
    should_reduce: Callable[[], bool]  # True if gradients of the running backward are reduced as soon as possible.
    # Divisor of the gradients of a backward that the engine has not started; raises if the engine had to start it.
    gradient_divisor: Callable[[bool], int]
    loss_scale: Callable[[], float]
    values_of: Callable[..., Any]  # A parameter's exact values; see `Values.values_of`.
    get_gradients: Callable[[], Any]  # The `Gradients` of the present model.
    prepare_load: Callable[[], Any]  # The parts for the present model, idle, so that their arrays can be rewritten.
    # (folder, names of values): inside they are rewritten; if that fails, only another load is allowed.
    loading: Callable[[str, frozenset[str]], AbstractContextManager[None]]
    close: Callable[[], None]
