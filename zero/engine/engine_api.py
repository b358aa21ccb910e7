"""What clients of DeepSpeed's engine ask for besides training: batch sizes that change, counters, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from zero.assembly.assembly import Assembly
from zero.assembly.state_kinds import OffloadStateTypeEnum
from zero.config import Config
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.given import given_config
from zero.engine.optimizer_states import MASTERS, EngineStates
from zero.engine.parameter_offload import ParameterOffload, no_external_parameters
from zero.optim.optimizer import Groups
from zero.optim.step import Stepper
from zero.schedule.coordinator import Coordinator
from zero.values.parameters import ParameterValues


class Surface:
    """Mixed into the engine."""

    module: nn.Module
    device: torch.device
    updater: Any
    """What steps, under DeepSpeed's name `optimizer`; None: nothing trains."""
    global_steps: int
    _config: Config
    _parts: Assembly
    _coordinator: Coordinator
    _stepper: Stepper
    _persistent_bound: bool
    parameter_offload: ParameterOffload | None = None
    """The handle on the hooks, at stage 3."""
    hooks_for_optimizer = False
    """DeepSpeed's engines that train nothing have at stage 3 the handle for an optimizer: do as they do."""
    global_samples = 0
    """Samples that steps have used, over all ranks."""

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """Of one parameter; the engine's."""
        raise NotImplementedError

    def ready(self, what: str, needs: frozenset[OffloadStateTypeEnum] | None = None) -> None:
        """Raise if the engine is closed; the engine's."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        """What `initialize` returns second: the optimizer, None where nothing trains (see `hooks_for_optimizer`)."""
        return self.parameter_offload if self.updater is None and self.hooks_for_optimizer else self.updater

    @property
    def config(self) -> dict[str, Any]:
        """As given, with values for "auto" and the stage: a plain dict; the model's is `engine.module.config`."""
        return self._given_config

    def _show_face(self) -> None:
        """Give clients what they look for on the model and the optimizer. Called once the parts are there."""
        self._given_config = given_config(self._config)
        stage = self._config.zero_optimization.stage
        if self.updater is not None:
            states = EngineStates(self.values_of, self.device)
            self.updater.keep_states_in(states)
            self.updater.offloader = self
            if stage in MASTERS:
                groups = Groups(self.updater.param_groups, states.masters_of)
                self.updater.__dict__[MASTERS[stage]] = groups
        if stage < 3:
            return
        self.parameter_offload = ParameterOffload(self.module, lambda: self._parts.hooks)
        if self.updater is not None:
            self.updater.__dict__["parameter_offload"] = self.parameter_offload
        self.module.__dict__["ds_external_parameters"] = no_external_parameters

    # ---- batch sizes ----------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by the number of micro-batches.

        Raises:
            ConfigError: it is no multiple of the micro-batches of all ranks.
        """
        once = self._config.train_micro_batch_size_per_gpu * self._config.world_size
        if train_batch_size < once or train_batch_size % once:
            raise ConfigError(
                f"set_train_batch_size: expected a multiple of {once} ({MICRO} x world_size), got {train_batch_size}"
            )
        self._set_batch(train_batch_size, self._config.train_micro_batch_size_per_gpu, train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward on one rank; the number of micro-batches stays.

        Raises:
            ConfigError: not positive.
        """
        steps = self._config.gradient_accumulation_steps
        _check_positive("set_train_micro_batch_size", micro_batch_size)
        self._set_batch(micro_batch_size * steps * self._config.world_size, micro_batch_size, steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Change the micro-batches per step; the size of each stays.

        Raises:
            ConfigError: not positive.
        """
        _check_positive("set_gradient_accumulation_steps", steps)
        micro = self._config.train_micro_batch_size_per_gpu
        self._set_batch(micro * steps * self._config.world_size, micro, steps)

    def _set_batch(self, train: int, micro: int, steps: int) -> None:
        self._config = self._config.with_batch({TRAIN: train, MICRO: micro, STEPS: steps})

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        config = self._config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the gradients of the last step, before clipping; None before the first."""
        return self._stepper.norm

    # ---- param groups ---------------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        """Give every param group this learning rate."""
        for group in self.updater.param_groups if self.updater is not None else []:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Of each param group its betas, or its momentum."""
        groups = self.updater.param_groups if self.updater is not None else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # ---- the device -----------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Let go of every gathered weight that nothing uses; what a later forward needs is fetched again.

        Raises:
            StateError: the engine is closed, or a forward or backward is running.
        """
        self.ready("empty_partition_cache", frozenset())
        self._coordinator.check_idle()
        self._coordinator.release_all()
        self._persistent_bound = False
        self.ready("empty_partition_cache", frozenset())

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Have torch compile the model in place, as `engine.module.compile(backend=backend, **compile_kwargs)`.

        Raises:
            ConfigError: `schedule` or `compiled_autograd_enabled`: DeepCompile is not available.
        """
        asked = [name for name, value in more.items() if value]
        if asked:
            raise ConfigError(f"compile: {', '.join(asked)}: DeepCompile is not available; leave it out")
        if not self.is_compiled:
            self.module.compile(backend=backend, **dict(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """True once `compile` was called."""
        return self.module._compiled_call_impl is not None


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{what}: expected at least 1, got {value}")
