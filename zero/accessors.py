"""What the engine answers: its configuration, under DeepSpeed's names, and the values it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zero.config import Config
from zero.keeping import EngineKeeper


class ConfigAccessors:
    """Mixed into the engine, which sets `_config` and `optimizer`."""

    _config: Config
    optimizer: Any

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return int(self._config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return int(self._config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return int(self._config.gradient_accumulation_steps)

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 is off."""
        return float(self._config.gradient_clipping)

    def zero_optimization(self) -> bool:
        """True: the stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return int(self._config.zero_optimization.stage)

    def bfloat16_enabled(self) -> bool:
        """True when weights are bf16 with an exact fp32 master."""
        return bool(self._config.bf16.enabled)

    def fp16_enabled(self) -> bool:
        """False: fp16 is not available."""
        return False

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [float(group["lr"]) for group in groups]


class ValueAccessors:
    """Mixed into the engine, which sets `_keeper` and `optimizer`."""

    _keeper: EngineKeeper
    optimizer: Any

    def current(self, what: str, units: Iterable[int] | None = None) -> None:
        """Wait until these units are as of the last step; the engine's."""
        raise NotImplementedError

    def full_parameter(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.weights(name)

    def full_master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """Copies of one parameter's `exp_avg` and `exp_avg_sq` (fp32, host), and its `step` count."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        counts = self.optimizer.step_counts if self.optimizer is not None else {}
        return {**self._keeper.moments(name), "step": counts.get(id(self._keeper.parameter(name)), 0)}

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights) of every parameter; tied ones under each of their names."""
        self.current("reading parameters")
        return self._keeper.named_weights()
