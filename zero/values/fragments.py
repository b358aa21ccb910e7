"""DeepSpeed's `safe_get_*` and `safe_set_*`: one parameter's exact values, independently of their tier.

They wait for the updates of the last step. A frozen parameter has neither states nor a separate fp32 value, and a
parameter without an engine has nothing but its `.grad`: for other values `safe_get_*` returns None and `safe_set_*`
does nothing, as with DeepSpeed. The full forms have the same result on every rank, and every rank must call them; every
rank must also call `safe_set_local_fp32_param`, because it changes the weights of all ranks. The local forms read or
write this rank's part, 1-D: the elements in its shards. So the length need not be an equal share of the parameter, and
may be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero.params.released_parameter import is_managed
from zero.params.tiles import engine_store_of
from zero.values.engine_store import EngineParameterStore
from zero.values.parameter_values import ParameterValues


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole fp32 value, a copy on the engine's device, in the parameter's shape."""
    return _read(param, ParameterValues.master)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the fp32 value and the weight; `value` has the parameter's shape. Raises StateError: another shape."""
    _write(param, lambda values: values.set_master(value))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A whole optimizer state such as "exp_avg", fp32, a copy on the engine's device.

    Raises StateError: there is no such state.
    """
    return _read(param, lambda values: values.state(optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an optimizer state; values are rounded to the states' dtype.

    Raises StateError: there is no such state, or another shape.
    """
    _write(param, lambda values: values.set_state(optim_state_key, value))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient accumulated since the last step, the mean over ranks, fp32, a copy on the engine's device.

    None if there is no gradient: before a backward, after `step()` or `zero_grad()`, or if backward did not reach the
    parameter. With fp16 it is scaled like the loss, by `engine.optimizer.cur_scale`, as in DeepSpeed.
    """
    gradient = _torch_grad(param)
    return gradient if gradient is not None else _read(param, ParameterValues.gradient)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient that the next step uses; values are rounded to the gradients' dtype.

    Raises StateError: another shape.
    """
    gradient = _torch_grad(param)
    if gradient is not None:
        gradient.copy_(value)
        return
    _write(param, lambda values: values.set_gradient(value))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by `update_func(gradient, parameter)`; parameters without one are skipped."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the fp32 value, 1-D."""
    return _read(param, ParameterValues.master_shard)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the fp32 value, and the weight on all ranks. Every rank calls it.

    Raises StateError: another length.
    """
    _write(param, lambda values: values.set_master(values.gather_whole(value)))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state, 1-D fp32. Raises StateError: there is no such state."""
    return _read(param, lambda values: values.state_shard(optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an optimizer state. Raises StateError: no such state, or another length."""
    _write(param, lambda values: values.set_state(optim_state_key, value))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient, 1-D fp32; None if nothing is reduced yet."""
    return _read(param, ParameterValues.gradient_shard)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient. Raises StateError: another length."""
    _write(param, lambda values: values.set_gradient(value))


def _engine_store_of(param: nn.Parameter) -> EngineParameterStore | None:
    store = engine_store_of(param) if is_managed(param) else None
    return store if isinstance(store, EngineParameterStore) else None


def _torch_grad(param: nn.Parameter) -> torch.Tensor | None:
    """`.grad` of a parameter without an engine; else None."""
    return param.grad if _engine_store_of(param) is None else None


def _read(param: nn.Parameter, read: Callable[[ParameterValues], torch.Tensor | None]) -> torch.Tensor | None:
    store = _engine_store_of(param)
    values = store.events.values_of(param) if store is not None else None
    result = read(values) if values is not None and values.is_trained else None
    return None if store is None or result is None else result.to(store.device)


def _write(param: nn.Parameter, write: Callable[[ParameterValues], None]) -> None:
    store = _engine_store_of(param)
    if store is not None and store.events.values_of(param).is_trained:
        write(store.events.values_of(param, to_change=True))
