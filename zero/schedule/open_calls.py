"""The open module calls of a forward of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class OpenCall:
    """A module call between its pre-forward and its post-forward."""

    module: nn.Module
    recompute: bool
    units: list[int] = field(default_factory=list)  # Units that the call uses, borrowed ones included.
    forward_ns: int = 0  # The time when its units were there; `backward_ns`: the same for its backward.
    backward_ns: int = 0
    begun: list[int] = field(default_factory=list)  # Forward uses that end with the call.
    sentinel: torch.Tensor | None = None
    # Inputs, their version counters and grad_fns, to see which the call modifies in place.
    versions: list[tuple[torch.Tensor, int, Any]] = field(default_factory=list)

    def close(self) -> None:
        """Drop the references to the graph: its nodes refer to this object, and nothing would free that cycle."""
        self.sentinel = None
        self.versions = []


@dataclass(slots=True)
class OpenCalls:
    """The open calls of one forward; empty if none runs.

    Attributes:
        calls: innermost last.
        look: an operation that reads units which no open call uses.
        root_depth: open calls of the whole model.
    """

    calls: list[OpenCall] = field(default_factory=list)
    look: OpenCall | None = None
    root_depth: int = 0
    backward_follows: bool = True

    def forget(self) -> None:
        """Drop all open calls: they were interrupted."""
        for call in self.calls:
            call.close()
        self.calls.clear()
