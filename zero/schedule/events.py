"""What the parts of an engine ask of it and tell it: one object, made once, handed down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The only way from the parts up to their engine. Parts that replace others get the same object."""

    check_open: Callable[[str], None]  # Raise StateError if the engine is closed; given what was attempted.
    ready_to_run: Callable[[str], None]  # `check_open`; weights are there, and what is always bound is bound.
    module_called: Callable[[], None]  # A module is called by itself: weights are on the device when it returns.
    take_written: Callable[[], None]  # Gradients that somebody has put into `.grad` replace those collected.
    backward_begins: Callable[[], None]  # What a backward needs is on the device when it returns.
    states_are_away: Callable[[], bool]  # `offload_states` has put something away; no update is due.
    # (what, units=None): StateError if the engine is closed; else these units (None: all) are as of the last step.
    current: Callable[..., None]
    changed: Callable[[int], None]  # A unit changes by other means than a step.
    edit_begins: Callable[[], None]  # Weights may be edited: no checkpoint is being written when it returns.
    reduces: Callable[[], bool]  # True when gradients of the backward under way are reduced as soon as they can be.
    # What gradients of a backward that the engine has not started are divided by; raises if it had to start it.
    parts_of_backward: Callable[[bool], int]
    loss_scale: Callable[[], float]
    values_of: Callable[..., Any]  # A parameter's exact values; see `Values.values_of`.
    rest: Callable[[], Any]  # The parts as the model is now, at rest, to rewrite their planes.
    close: Callable[[], None]
