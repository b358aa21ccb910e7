"""The handle on an engine's hooks that clients of DeepSpeed's ZeRO-3 use: take them off, generate, put them back.

Inside `GatheredParameters` all values are there and stay, so a model whose hooks are off runs as plain torch does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zero.schedule.hooks import ModuleHooks


class HooksHandle:
    """Takes all hooks of a model off, like a handle of torch's."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove  # Idempotent.


class Trace:
    """DeepSpeed's name for who knows the order of modules. Ours needs no help: a wrong guess costs one miss."""

    def is_invalid_trace(self) -> bool:
        """True: there is nothing to invalidate."""
        return True

    def _invalidate_trace(self) -> None:
        """Nothing to do."""


class ParameterOffload:
    """`engine.optimizer.parameter_offload` at stage 3.

    Args:
        hooks: of the engine as it is now; parts change when the model does.

    Attributes:
        forward_hooks: what removes the hooks; clients call `remove()` on each and replace the list.
        backward_hooks: empty: the same hooks see both directions.
    """

    def __init__(self, module: nn.Module, hooks: Callable[[], ModuleHooks]) -> None:
        self.module, self._hooks = module, hooks
        self.param_coordinator = Trace()
        self.forward_hooks = [HooksHandle(self._remove)]
        self.backward_hooks: list[HooksHandle] = []

    def get_param_coordinator(self) -> Trace:
        """`param_coordinator`, as DeepSpeed asks for it."""
        return self.param_coordinator

    def _remove(self) -> None:
        self._hooks().suspend()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks back on, DeepSpeed's name for it. Idempotent."""
        self._hooks().resume()
        self.forward_hooks = [HooksHandle(self._remove)]
        self.backward_hooks = []


def no_external_parameters() -> tuple[tuple[str, nn.Parameter], ...]:
    """`module.ds_external_parameters()`: a parameter that is used outside its module is fetched when it is touched."""
    return ()
