"""Precision in the training loop: scaling losses, casting inputs, running under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import StateError
from zero.assembly.run import Run
from zero.optim.loss_scale import autocast_dtype

HALF = torch.float16


class LossScaling:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._loss_is_finite: torch.Tensor | None = None  # All since the last step; None: none was checked.

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """See `ZeroEngine.scale`."""
        if self._run.updater is None:
            raise StateError("scale: the engine was made without an optimizer; add one to the config or pass one")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise StateError(
                "scale: expected a scalar loss that requires a gradient; reduce other losses to a scalar first, "
                "such as loss.sum()"
            )
        return self.scale_loss(loss, self._run.config.gradient_accumulation_steps)

    def divide_loss(self, loss: torch.Tensor, parts: int) -> torch.Tensor:
        """The loss divided by `parts`, an fp16 loss in fp32: scale / parts may fit fp16 where the scale does not."""
        return (loss.float() if loss.dtype == torch.float16 else loss) / parts

    def scale_loss(self, loss: torch.Tensor, accumulation: int = 1) -> torch.Tensor:
        """The loss times the scale; a hook on it marks its backward as scaled."""
        if self._run.updater is not None and self._run.scaler.skips_nonfinite:
            finite = torch.isfinite(loss.detach()).all()
            self._loss_is_finite = finite if self._loss_is_finite is None else self._loss_is_finite & finite
        if accumulation == 1 and not self._run.scaler.is_needed:
            return loss
        scaled = loss * self._run.scaler.cur_scale

        def on_backward(gradient: torch.Tensor) -> torch.Tensor:
            self._run.parts.backward_watch.begin_scaled()
            return gradient / accumulation if accumulation > 1 else gradient

        if scaled.requires_grad:
            scaled.register_hook(on_backward)  # type: ignore[no-untyped-call]
        return scaled

    def gradient_divisor(self, is_scaled: bool) -> int:
        """The divisor of this backward's gradients: the accumulation steps; 1 for a `is_scaled` loss, divided already.

        Raises StateError: the loss is not scaled, but fp16 needs it.
        """
        if is_scaled:
            return 1
        if self._run.updater is not None and self._run.scaler.is_needed:
            raise StateError(
                "backward: the loss is not scaled, so fp16 gradients would underflow; call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._run.config.gradient_accumulation_steps

    def losses_were_finite(self) -> bool:
        """True if all losses since the last step were finite. Waits for the device."""
        return self._loss_is_finite is None or bool(self._loss_is_finite)

    def begin_step(self) -> None:
        """Discard the result of earlier losses: the next step, or the next attempt of this one, begins."""
        self._loss_is_finite = None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context around a forward of the engine: `torch_autocast`, or the autocast that the caller has entered.

        It disables torch's cache, which would keep each cast copy until the end of the outermost context: with
        streamed weights these copies would add up to the whole model.
        """
        kind = self._run.device.type
        dtype = autocast_dtype(self._run.config, self._run.device)
        if dtype is None and not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, dtype or torch.get_autocast_dtype(kind), cache_enabled=False):
            yield

    def cast_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cast the positional arguments if `fp16.auto_cast` is set, as DeepSpeed does."""
        if not (self._run.config.fp16.enabled and self._run.config.fp16.auto_cast):
            return args
        return tuple(_half(value) for value in args)


def _half(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(HALF) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _half(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_half(item) for item in value))
    return type(value)(_half(item) for item in value) if isinstance(value, (list, tuple)) else value
