"""Common code of the optimizers of this package: the loop over parameters, in fp32 for any dtype of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError


class PlainOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose rule is one function of fp32 tensors; states are fp32, and made by the first step.

    A parameter that is stored in 16 bits is widened, updated and rounded to nearest: it has no master here. Under
    `zero.initialize` it has one.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is called first, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_sparse()
        for group in self.param_groups:
            self.begin_group_step(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)
        return loss

    def _check_sparse(self) -> None:
        """Raise ConfigError, before anything is changed: there is a sparse gradient that the rule does not take."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse and not self.takes_sparse(group):
                    raise ConfigError(
                        f"{type(self).__name__}: expected dense gradients, got a sparse one of shape "
                        f"{tuple(parameter.shape)}; use nn.Embedding without sparse=True, or DeepSpeedCPUAdagrad "
                        "without weight_decay"
                    )

    def takes_sparse(self, group: dict[str, Any]) -> bool:
        """True: `update` may get a sparse gradient, coalesced."""
        return False

    def begin_group_step(self, group: dict[str, Any]) -> None:
        """Called when a step of this param group begins; classes that count steps in their groups do so here."""

    def _step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = int(state.get("step", 0)) + 1
        values = parameter.detach()
        exact = values.dtype == torch.float32 and values.is_contiguous()
        weight = values if exact else values.float().contiguous()
        grad = gradient.detach().float()
        grad = grad.coalesce() if grad.is_sparse else grad.contiguous()
        self.update(weight, grad, state, group)
        if not exact:
            values.copy_(weight)

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One update in place.

        Args:
            weight: fp32, contiguous.
            grad: the same; must not be changed.
            state: of the parameter; `step` already counts this update.
            group: the param group.
        """
        raise NotImplementedError

    @staticmethod
    def state_tensor(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        """The state's tensor of that name, fp32, with the shape of `like`; zeros at its first use."""
        if name not in state:
            state[name] = torch.zeros_like(like)
        tensor: Tensor = state[name]
        return tensor


def refuse(name: str, **options: object) -> None:
    """Raise ConfigError for the first argument that requests an unsupported option."""
    for key, value in options.items():
        if value:
            raise ConfigError(f"{name}: {key}={value!r} is not available; leave it out, or use the torch.optim class")
