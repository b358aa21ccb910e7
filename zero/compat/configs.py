"""`deepspeed.runtime.config` and `runtime.zero.config`: our configuration under DeepSpeed's names."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from offload.errors import ConfigError
from zero.compat.config_values import BLOCKS_BY_NAME, CONFIG, block_of_config
from zero.compat.logs import logger
from zero.compat.monitoring import BLOCKS, DeepSpeedMonitorConfig
from zero.config import load_config, reading_as_deepspeed
from zero.config.precision_block import Bf16Config, Fp16Config
from zero.config.zero_block import ZeroConfig

# Values of `optimizer.type` that DeepSpeed lists and that work here; any class of torch.optim works too.
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    return Bf16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> Fp16Config:
    return Fp16Config(**(param_dict.get("fp16") or {}))


class ValidationMode:
    """What happens if the ranks give checkpoints different tags."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DeepSpeedZeroConfig(ZeroConfig):
    """The block `zero_optimization`, from keyword arguments that are the keys of the JSON.

    Keys that begin with `stage3_` can be read without it too. Raises ConfigError: names all problems at once.
    """

    def __init__(self, **keys: Any) -> None:
        with reading_as_deepspeed():
            block = load_config({"zero_optimization": keys}).zero_optimization
        self.__setstate__(block.__getstate__())

    @classmethod
    def from_block(cls, block: ZeroConfig) -> DeepSpeedZeroConfig:
        """The same block, of this class."""
        copy = cls.__new__(cls)
        copy.__setstate__(block.__getstate__())
        return copy

    def __getattr__(self, name: str) -> Any:
        if name in self.aliases:
            return getattr(self, self.aliases[name])
        return super().__getattr__(name)  # type: ignore[misc]


class DeepSpeedConfig:
    """A configuration, read and checked; its values are attributes, as in DeepSpeed.

    Raises ConfigError: names all problems at once. `config`: path or dict.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig: mpu and mesh_device are not available; leave them out")
        with reading_as_deepspeed():
            self.config = load_config(config)
        zero = self.config.zero_optimization
        self.zero_config = DeepSpeedZeroConfig.from_block(zero)
        self.zero_optimization_stage, self.zero_enabled = zero.stage, zero.stage > 0
        self._param_dict = dict(self.config._report.source)
        logs = block_of_config(self.config, "comms_logger")
        self.comms_config = SimpleNamespace(comms_logger=logs, comms_logger_enabled=logs.enabled)
        self.monitor_config = DeepSpeedMonitorConfig(**{name: getattr(self.config, name) for name in BLOCKS})

    def __getattr__(self, name: str) -> Any:
        """Keys of the configuration, and DeepSpeed's names of its blocks and values."""
        if name.startswith("_") or name == "config":
            raise AttributeError(name)
        if name in BLOCKS_BY_NAME:
            return block_of_config(self.config, BLOCKS_BY_NAME[name])
        return CONFIG[name](self.config) if name in CONFIG else getattr(self.config, name)

    def print_user_config(self) -> None:
        """Log the configuration as it was given."""
        logger.info("json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=repr))

    def print(self, name: str) -> None:
        """Log every value of the configuration, under this title."""
        logger.info("%s:", name)
        for key in type(self.config).model_fields:
            logger.info("  %s: %s", key, getattr(self.config, key))
        self.print_user_config()
