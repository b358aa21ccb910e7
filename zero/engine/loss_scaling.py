"""What an engine does about precision: it scales losses, casts inputs, runs under autocast, counts skipped steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import StateError
from zero.config import Config
from zero.optim.loss_scale import LossScaler, autocast_dtype, make_scaler
from zero.optim.scheduling import step_scheduler
from zero.schedule.backward import BackwardWatch

HALF = torch.float16


class ScalesLoss:
    """Mixed into the engine.

    Attributes:
        scaler: of the loss; its scale is 1 where nothing is fp16.
        skipped_steps: steps that changed no weight because a gradient was inf or NaN; `global_steps` counts them too.
    """

    _config: Config
    device: torch.device
    updater: Any
    lr_scheduler: Any
    scaler: LossScaler
    skipped_steps = 0
    _step_applied = False
    _schedule_arguments: Mapping[str, Any] = {}
    """For the scheduler, with the step that was asked for last."""
    _watch: BackwardWatch
    _loss_is_finite: torch.Tensor | None = None

    def _make_scaler(self) -> None:
        self.scaler = make_scaler(self._config, self.device)
        if self.updater is not None:
            self.updater.loss_scaler = self.scaler

    def _note_applied(self, applied: bool) -> None:
        """A step is decided. The schedule follows the steps that change weights."""
        self._step_applied = applied
        self.skipped_steps += not applied
        self.updater.overflow = not applied
        if applied:
            self.updater.mark_stepped()
            if self.lr_scheduler is not None:
                step_scheduler(self.lr_scheduler, self._schedule_arguments, self._config.train_batch_size)

    def was_step_applied(self) -> bool:
        """Did the last `step()` change weights? Not between accumulation boundaries, nor where it was skipped."""
        return self._step_applied

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss for `scaled.backward()` instead of `engine.backward(loss)`: times the loss scale.

        Its gradients are also divided by the accumulation steps, as those of `engine.backward` are.

        Raises:
            StateError: it is no scalar with a graph, or there is no optimizer.
        """
        if self.updater is None:
            raise StateError("scale: the engine was made without an optimizer; add one to the config or pass one")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise StateError("scale: expected a scalar loss that requires a gradient; of others scale a sum")
        return self._scaled(loss, self._config.gradient_accumulation_steps)

    def _part_of(self, loss: torch.Tensor, parts: int) -> torch.Tensor:
        """The loss divided; an fp16 one in fp32, since a part of the scale may fit fp16 where all of it does not."""
        return (loss.float() if loss.dtype == torch.float16 else loss) / parts

    def _scaled(self, loss: torch.Tensor, accumulation: int = 1) -> torch.Tensor:
        """The loss times the scale; backwards of it are known to be scaled."""
        if self.updater is not None and self.scaler.skips:
            finite = torch.isfinite(loss.detach()).all()
            self._loss_is_finite = finite if self._loss_is_finite is None else self._loss_is_finite & finite
        if accumulation == 1 and not self.scaler.is_needed:
            return loss
        scaled = loss * self.scaler.cur_scale

        def passed(gradient: torch.Tensor) -> torch.Tensor:
            self._watch.scaled = True
            return gradient / accumulation if accumulation > 1 else gradient

        if scaled.requires_grad:
            scaled.register_hook(passed)  # type: ignore[no-untyped-call]
        return scaled

    def parts_of_backward(self, scaled: bool) -> int:
        """The accumulation steps, unless the loss of this `loss.backward()` is `scaled`, and so divided already.

        Raises:
            StateError: it had to be scaled.
        """
        if scaled:
            return 1
        if self.updater is not None and self.scaler.is_needed:
            raise StateError(
                "backward: the loss is not scaled, and fp16 gradients would vanish; call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._config.gradient_accumulation_steps

    def _loss_was_finite(self) -> bool:
        """Of all losses since the last step; from here on the next one's count."""
        finite, self._loss_is_finite = self._loss_is_finite, None
        return finite is None or bool(finite)

    @contextmanager
    def _precisely(self) -> Iterator[None]:
        """Around a forward of the engine: `torch_autocast`, or the autocast around the engine.

        Torch would keep the copies it casts until the end of the outermost context: with weights that come and go that
        is the whole model.
        """
        kind = self.device.type
        dtype = autocast_dtype(self._config, self.device)
        if dtype is None and not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, dtype or torch.get_autocast_dtype(kind), cache_enabled=False):
            yield

    def _cast_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`fp16.auto_cast`: positional arguments, as in DeepSpeed."""
        if not (self._config.fp16.enabled and self._config.fp16.auto_cast):
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
