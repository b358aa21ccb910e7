"""The optimizer state of a sub-group: its parts and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload.kernels import kernels
from offload.kernels.moments import MOMENTS_BLOCK_NUMEL, Moments
from offload.sizes import PAGE_BYTES, align_up

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""States of Adam and AdamW, under torch's names."""


@dataclass(frozen=True, slots=True)
class RuleStates:
    """The states that the update rules of an optimizer keep for parameters."""

    names_by_rule: tuple[tuple[str, ...], ...]
    """Names of the states of each rule."""
    small_bytes: int = 0
    """Bytes of states whose shape differs from their parameter's, on the rank with the most; in no tiered array."""


ADAM_RULE_STATES = RuleStates((ADAM_STATES,))


@dataclass(frozen=True, slots=True)
class States:
    """The optimizer's states of N elements.

    Attributes:
        tensors: (N,) fp32 each, as they are stored; empty if they are stored in fewer bits.
        moments: Adam's two states, as its kernel takes them; None for other optimizers.
    """

    tensors: tuple[Tensor, ...]
    moments: Moments | None = None

    def part(self, begin: int, end: int) -> States:
        """Elements [begin, end); whole blocks if there are scales."""
        moments = None if self.moments is None else self.moments.view_range(begin, end)
        return replace(self, tensors=tuple(tensor[begin:end] for tensor in self.tensors), moments=moments)

    def load(self, begin: int, end: int) -> tuple[Tensor, ...]:
        """Elements [begin, end) of each state as new fp32 tensors."""
        if self.tensors or self.moments is None:
            return tuple(tensor[begin:end].clone() for tensor in self.tensors)
        first, last = begin // MOMENTS_BLOCK_NUMEL * MOMENTS_BLOCK_NUMEL, align_up(end, MOMENTS_BLOCK_NUMEL)
        loaded = kernels.moments_load(self.moments.view_range(first, last))
        return tuple(values[begin - first : end - first] for values in loaded)

    def write(self, which: int, begin: int, values: Tensor) -> None:
        """Write fp32 values of one state from element `begin` on, rounded to nearest."""
        end = begin + values.numel()
        if self.tensors or self.moments is None:
            self.tensors[which][begin:end].copy_(values)
            return
        first, last = begin // MOMENTS_BLOCK_NUMEL * MOMENTS_BLOCK_NUMEL, align_up(end, MOMENTS_BLOCK_NUMEL)
        states = self.load(first, last)
        states[which][begin - first : end - first].copy_(values)
        self.part(first, last).store(states)

    def store(self, values: Sequence[Tensor]) -> None:
        """Write (N,) fp32 values of each state, rounded to nearest."""
        if self.tensors or self.moments is None:
            for tensor, source in zip(self.tensors, values, strict=True):
                tensor.copy_(source)
        else:
            exp_avg, exp_avg_sq = values
            kernels.moments_store(self.moments, exp_avg, exp_avg_sq)


@dataclass(frozen=True, slots=True)
class SubGroupState:
    """Views into the bytes of one sub-group's optimizer state."""

    remainder: Tensor | None
    """Difference between the weights and their fp32 masters, see `offload.kernels.masters`; None: there is none."""
    states: States


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The parts of a sub-group's state, one after the other: remainder (if there is one), states, scales (if any)."""

    remainder: torch.dtype | None
    """Dtype of the remainders from weights to fp32 masters; None: the weights are the masters."""
    state_dtype: torch.dtype
    """Dtype of the states: fp32; for Adam also bf16, or uint8 for 8-bit codes with scales."""
    state_names: tuple[str, ...] = ADAM_STATES
    """Names of the states."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the state of `numel` elements, whole pages."""
        states = Moments.nbytes(self.state_dtype, numel) if self._is_adam else 4 * numel * len(self.state_names)
        return align_up(self._remainder_bytes(numel) + states, PAGE_BYTES)

    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        """(first byte, bytes) in the state of `numel` elements of each part's elements [begin, end), whole blocks."""
        ranges, first = [], 0
        for nbytes, per in self._part_widths:
            ranges.append((first + begin // per * nbytes, (end - begin) // per * nbytes))
            first += numel // per * nbytes
        return ranges

    def from_parts(self, parts: Sequence[Tensor], begin: int, step: int = 0) -> SubGroupState:
        """The state of coordinates from `begin` on that has these parts (uint8), in order; only updates need `step`."""
        remainder = None if self.remainder is None else parts[0].view(self.remainder)
        tensors = parts[0 if remainder is None else 1 :]
        if not self._is_adam:
            return SubGroupState(remainder, States(tuple(tensor.view(torch.float32) for tensor in tensors)))
        states = tuple(tensor.view(self.state_dtype) for tensor in tensors[:2])
        moments = Moments(states[0], states[1], origin=begin, step=step)
        if len(tensors) > len(states):
            scales = [tensor.view(torch.float32) for tensor in tensors[2:]]
            moments = replace(moments, exp_avg_scale=scales[0], exp_avg_sq_scale=scales[1])
        return SubGroupState(remainder, States(states if self.state_dtype == torch.float32 else (), moments))

    @property
    def _is_adam(self) -> bool:
        return self.state_names == ADAM_STATES

    @property
    def _part_widths(self) -> list[tuple[int, int]]:
        """(bytes, elements that they are for) of each part."""
        state_bytes = self.state_dtype.itemsize if self._is_adam else 4
        widths = [] if self.remainder is None else [(self.remainder.itemsize, 1)]
        widths += [(state_bytes, 1)] * len(self.state_names)
        return widths + [(4, MOMENTS_BLOCK_NUMEL)] * (2 if self._is_adam and self.state_dtype == torch.uint8 else 0)

    def _remainder_bytes(self, numel: int) -> int:
        return 0 if self.remainder is None else self.remainder.itemsize * numel
