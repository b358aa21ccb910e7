"""`deepspeed.runtime.config` and `runtime.zero.config`: our configuration under DeepSpeed's names."""

from __future__ import annotations

import enum
from typing import Any

from offload.errors import ConfigError
from zero.config import load_config, tolerating_unknown_keys
from zero.config.offload_block import OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig
from zero.config.offload_block import OffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from zero.config.zero_block import ZeroConfig as DeepSpeedZeroConfig
from zero.state_kinds import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroStageEnum",
]

DeepSpeedConfigError = ConfigError


class ZeroStageEnum(int, enum.Enum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedConfig:
    """A configuration, read and checked; its values are attributes, as in DeepSpeed.

    Args:
        config: path or dict.
        mpu: must be None.
        mesh_device: must be None.

    Raises:
        ConfigError: every problem at once.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig: mpu and mesh_device are not available; leave them out")
        with tolerating_unknown_keys():
            self.config = load_config(config)
        zero = self.config.zero_optimization
        self.zero_config, self.zero_optimization_stage, self.zero_enabled = zero, zero.stage, zero.stage > 0
        self._param_dict = dict(self.config._report.source)

    def __getattr__(self, name: str) -> Any:
        """Keys of the configuration."""
        if name.startswith("_") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)
