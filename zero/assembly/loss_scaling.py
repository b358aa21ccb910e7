"""What an engine does about precision: it scales losses, casts inputs, runs under autocast."""

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
        self._loss_is_finite: torch.Tensor | None = None  # Of all losses since the last step; None: of none it matters.

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss for `scaled.backward()` instead of `engine.backward(loss)`: times the loss scale.

        Its gradients are also divided by the accumulation steps, as those of `engine.backward` are. Raises StateError:
        it is no scalar with a graph, or there is no optimizer.
        """
        if self._run.updater is None:
            raise StateError("scale: the engine was made without an optimizer; add one to the config or pass one")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise StateError("scale: expected a scalar loss that requires a gradient; of others scale a sum")
        return self.scaled(loss, self._run.config.gradient_accumulation_steps)

    def part_of(self, loss: torch.Tensor, parts: int) -> torch.Tensor:
        """The loss divided; an fp16 one in fp32, since a part of the scale may fit fp16 where all of it does not."""
        return (loss.float() if loss.dtype == torch.float16 else loss) / parts

    def scaled(self, loss: torch.Tensor, accumulation: int = 1) -> torch.Tensor:
        """The loss times the scale; backwards of it are known to be scaled."""
        if self._run.updater is not None and self._run.scaler.skips:
            finite = torch.isfinite(loss.detach()).all()
            self._loss_is_finite = finite if self._loss_is_finite is None else self._loss_is_finite & finite
        if accumulation == 1 and not self._run.scaler.is_needed:
            return loss
        scaled = loss * self._run.scaler.cur_scale

        def passed(gradient: torch.Tensor) -> torch.Tensor:
            self._run.parts.watch.begin_scaled()
            return gradient / accumulation if accumulation > 1 else gradient

        if scaled.requires_grad:
            scaled.register_hook(passed)  # type: ignore[no-untyped-call]
        return scaled

    def parts_of_backward(self, scaled: bool) -> int:
        """The accumulation steps, unless the loss of this `loss.backward()` is `scaled`, and so divided already.

        Raises StateError: it had to be scaled.
        """
        if scaled:
            return 1
        if self._run.updater is not None and self._run.scaler.is_needed:
            raise StateError(
                "backward: the loss is not scaled, and fp16 gradients would vanish; call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._run.config.gradient_accumulation_steps

    def losses_were_finite(self) -> bool:
        """Of all since the last step. Waits for the device."""
        return self._loss_is_finite is None or bool(self._loss_is_finite)

    def begin_step(self) -> None:
        """From here on the next step's losses count, or those of another attempt."""
        self._loss_is_finite = None

    @contextmanager
    def precisely(self) -> Iterator[None]:
        """Around a forward of the engine: `torch_autocast`, or the autocast around the engine.

        Torch would keep the copies it casts until the end of the outermost context: with weights that come and go that
        is the whole model.
        """
        kind = self._run.device.type
        dtype = autocast_dtype(self._run.config, self._run.device)
        if dtype is None and not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, dtype or torch.get_autocast_dtype(kind), cache_enabled=False):
            yield

    def cast_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`fp16.auto_cast`: positional arguments, as in DeepSpeed."""
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
