"""The loss scale: it keeps fp16 gradients from vanishing, and changes when steps overflow.

[Note: rule] The rule is DeepSpeed's. Overflows first use up the hysteresis, one by one. Then each overflow halves the
scale, down to the minimum, where a further overflow is an error. After a window of steps without overflow the scale
doubles and the hysteresis is restored. DeepSpeed counts the window from the step after the first one that succeeds.
torch.amp.GradScaler has the same rule without hysteresis and minimum, and counts from the first successful step itself.

[Note: one scale a step] The scale changes only at steps, so all gradients of a step have the same scale. The factor
that clips also divides by the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import StateError
from zero.config import Config

FACTOR = 2.0
COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # Values that change; DeepSpeed's names.
TORCH_WINDOW, TORCH_POWER = 2000, 16  # Defaults of torch.amp.GradScaler.
SMALLEST_SCALE = 2.0**-126


class LossScaleError(StateError):
    """An overflow at the smallest loss scale. Weights, states and the scale are as they were before the step."""


@dataclass(slots=True)
class LossScaler:
    """The scale of one engine's loss.

    Attributes:
        dynamic: overflows change the scale.
        scale_window: number of steps without overflow after which the scale grows.
        skips_first_step: the first of these steps does not count.
        delayed_shift: number of overflows until the scale shrinks.
        raise_error_at_min_scale: an overflow at `min_scale` is an error.
        skips_nonfinite: steps with gradients that are not finite are skipped.
    """

    cur_scale: float = 1.0
    dynamic: bool = False
    scale_window: int = 1000
    skips_first_step: bool = True
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    raise_error_at_min_scale: bool = True
    skips_nonfinite: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 1

    # DeepSpeed's other names, and the factor by which the scale grows and shrinks.
    loss_scale = property(lambda self: self.cur_scale)
    dynamic_loss_scale = property(lambda self: self.dynamic)
    scale_factor = property(lambda self: FACTOR)

    @property
    def is_needed(self) -> bool:
        """True: losses must be scaled before their backward."""
        return self.dynamic or self.cur_scale != 1.0

    @property
    def is_at_minimum(self) -> bool:
        """True: a further overflow is an error."""
        return self.dynamic and self.raise_error_at_min_scale and self._will_shrink and self.cur_scale == self.min_scale

    @property
    def _will_shrink(self) -> bool:
        return self.delayed_shift == 1 or self.cur_hysteresis == 1

    def must_skip(self, norm: float) -> bool:
        """True: a step with gradients of this norm must not change the weights."""
        return self.skips_nonfinite and not math.isfinite(norm)

    def update_scale(self, *, overflow: bool) -> None:
        """A step was taken, or skipped because of an overflow."""
        if not self.dynamic:
            return
        if overflow:
            if self._will_shrink:
                self.cur_scale = max(self.cur_scale / FACTOR, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - self.skips_first_step
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= FACTOR
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes."""
        return {"dynamic": self.dynamic, **{name: getattr(self, name) for name in COUNTERS}}

    def resumed_scale(self, state: Mapping[str, Any] | None) -> float:
        """The scale after a `load_state_dict` of this state."""
        return self.cur_scale if state is None or not self._can_load(state) else float(state["cur_scale"])

    def _can_load(self, state: Mapping[str, Any]) -> bool:
        return self.dynamic and bool(state.get("dynamic", "cur_iter" in state))

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state` if both scales are dynamic; a static scale stays as configured.

        `state`: a `state_dict`, or the attributes of DeepSpeed's scaler; None: there was none.
        """
        if state is None or not self._can_load(state):
            return
        for name in COUNTERS:
            kind = float if name == "cur_scale" else int
            setattr(self, name, kind(state.get(name, getattr(self, name))))


def make_scaler(config: Config, device: torch.device) -> LossScaler:
    """The scaler of a configuration; without fp16 its scale is 1 and stays 1.

    Args:
        config: validated configuration.
        device: the device that computes the model: it decides the default dtype of torch.autocast.
    """
    fp16 = config.fp16
    if fp16.enabled and fp16.dynamic:
        return LossScaler(
            2.0**fp16.initial_scale_power,
            dynamic=True,
            scale_window=fp16.loss_scale_window,
            delayed_shift=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=fp16.min_loss_scale,
            cur_hysteresis=fp16.hysteresis,
        )
    if fp16.enabled:
        return LossScaler(fp16.loss_scale)
    if autocast_dtype(config, device) == torch.float16:
        return LossScaler(
            2.0**TORCH_POWER,
            dynamic=True,
            scale_window=TORCH_WINDOW,
            skips_first_step=False,
            min_scale=SMALLEST_SCALE,
            raise_error_at_min_scale=False,
        )
    return LossScaler(skips_nonfinite=config.bf16.check_grad_overflow or not config.bf16.enabled)


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The dtype that `torch_autocast` casts to; None if it is off."""
    block = config.torch_autocast
    if not block.enabled:
        return None
    if block.dtype is None:
        return torch.get_autocast_dtype(device.type)
    return torch.float16 if block.dtype == "fp16" else torch.bfloat16
