"""The handle on an engine's hooks. Clients of DeepSpeed's ZeRO-3 remove the hooks, generate, and put them back.

Inside `GatheredParameters` all values are present and stay, so a model without hooks runs as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zero.cache.hooks import ModuleHooks


class HooksHandle:
    """Removes all hooks of a model, like a torch hook handle."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove  # Idempotent.


class ParamCoordinator:
    """DeepSpeed's object for the order of modules. Clients need not invalidate ours: a wrong guess costs one miss."""

    def is_invalid_trace(self) -> bool:
        """True: there is nothing to invalidate."""
        return True

    def _invalidate_trace(self) -> None:
        """Nothing to do."""


class ParameterOffload:
    """`engine.optimizer.parameter_offload` at stage 3.

    Args:
        hooks: returns the engine's present hooks; the engine makes new ones when the model changes.

    Attributes:
        forward_hooks: handles that remove the hooks; clients call `remove()` on each and replace the list.
        backward_hooks: empty, because the same hooks see both directions.
    """

    def __init__(self, module: nn.Module, hooks: Callable[[], ModuleHooks]) -> None:
        self.module, self._hooks = module, hooks
        self.param_coordinator = ParamCoordinator()
        self.forward_hooks = [HooksHandle(self._remove)]
        self.backward_hooks: list[HooksHandle] = []

    def get_param_coordinator(self) -> ParamCoordinator:
        """`param_coordinator`, under DeepSpeed's name."""
        return self.param_coordinator

    def _remove(self) -> None:
        self._hooks().suspend()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks back. Idempotent. The name is DeepSpeed's."""
        self._hooks().resume()
        self.forward_hooks = [HooksHandle(self._remove)]
        self.backward_hooks = []


def no_external_parameters() -> tuple[tuple[str, nn.Parameter], ...]:
    """`module.ds_external_parameters()`. Empty: a parameter that is used outside its module is fetched at that use."""
    return ()
