"""Calls of DeepSpeed's engine besides training: changes of batch sizes, learning rates, counters, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import ConfigError
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.offload_states import OffloadStates
from zero.assembly.run import Run
from zero.config.batch import MICRO
from zero.config.sources import user_config
from zero.engine.parameter_offload import ParameterOffload, no_external_parameters
from zero.engine.values import MASTERS, EngineStates
from zero.optim.optimizer import GroupTensors, learning_rates, momentum_of


class ClientCalls:
    """The calls of one engine; its parts are built before.

    Args:
        run: the state that the collaborators share.
        steps: the engine's steps.
        offloading: offloads states; the optimizer offers its calls too.

    Attributes:
        parameter_offload: the handle on the hooks, at stage 3.
        hooks_for_optimizer: return that handle as the optimizer if nothing trains, as DeepSpeed does at stage 3.
    """

    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges, offloading: OffloadStates) -> None:
        self._run, self._steps = run, steps
        self._user_config = user_config(run.config)
        self.hooks_for_optimizer = False
        self.parameter_offload: ParameterOffload | None = None
        stage, updater = run.config.zero_optimization.stage, run.updater
        if stage == 3:
            self.parameter_offload = ParameterOffload(run.module, lambda: run.parts.hooks)
            run.module.__dict__["ds_external_parameters"] = no_external_parameters
        if updater is None:
            return
        states = EngineStates(run, steps, changes)
        updater.set_state_access(states)
        updater.offloader = offloading
        if stage in MASTERS:
            updater.__dict__[MASTERS[stage]] = GroupTensors(updater.param_groups, states.masters_of)
        if self.parameter_offload is not None:
            updater.__dict__["parameter_offload"] = self.parameter_offload

    @property
    def optimizer(self) -> Any:
        """See `ZeroEngine.optimizer`."""
        updater = self._run.updater
        return self.parameter_offload if updater is None and self.hooks_for_optimizer else updater

    @property
    def config(self) -> dict[str, Any]:
        """See `ZeroEngine.config`."""
        return self._user_config

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """See `ZeroEngine.set_train_batch_size`."""
        config = self._run.config
        once = config.train_micro_batch_size_per_gpu * config.world_size
        if train_batch_size < once or train_batch_size % once:
            raise ConfigError(
                f"set_train_batch_size: expected a multiple of {once} ({MICRO} x world_size), got {train_batch_size}"
            )
        self._run.set_batch(train_batch_size, config.train_micro_batch_size_per_gpu, train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """See `ZeroEngine.set_train_micro_batch_size`."""
        steps, world_size = self._run.config.gradient_accumulation_steps, self._run.config.world_size
        _check_positive("set_train_micro_batch_size", micro_batch_size)
        self._run.set_batch(micro_batch_size * steps * world_size, micro_batch_size, steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """See `ZeroEngine.set_gradient_accumulation_steps`."""
        _check_positive("set_gradient_accumulation_steps", steps)
        micro, world_size = self._run.config.train_micro_batch_size_per_gpu, self._run.config.world_size
        self._run.set_batch(micro * steps * world_size, micro, steps)

    def get_global_grad_norm(self) -> float | None:
        """See `ZeroEngine.get_global_grad_norm`."""
        return self._run.parts.stepper.norm

    def set_lr(self, lr: float) -> None:
        """See `ZeroEngine.set_lr`."""
        for group in self._run.updater.param_groups if self._run.updater is not None else []:
            group["lr"] = lr

    def get_lr(self) -> list[float]:
        """See `ZeroEngine.get_lr`."""
        return learning_rates(self._run.updater)

    def get_mom(self) -> list[Any]:
        """See `ZeroEngine.get_mom`."""
        return momentum_of(self._run.updater)

    def empty_partition_cache(self) -> None:
        """See `ZeroEngine.empty_partition_cache`."""
        self._steps.make_ready("empty_partition_cache", frozenset())
        self._run.parts.coordinator.evict_all()
        self._steps.make_ready("empty_partition_cache", frozenset())

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """See `ZeroEngine.compile`."""
        options = [name for name, value in more.items() if value]
        if options:
            raise ConfigError(f"compile: {', '.join(options)}: DeepCompile is not available; leave it out")
        if not self.is_compiled:
            self._run.module.compile(backend=backend, **dict(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """See `ZeroEngine.is_compiled`."""
        return self._run.module._compiled_call_impl is not None


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{what}: expected at least 1, got {value}")
