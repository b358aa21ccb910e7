"""What DeepSpeed's engine answers about its configuration, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zero.config import Config


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
