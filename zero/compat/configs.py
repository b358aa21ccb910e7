"""`deepspeed.runtime.config` and `runtime.zero.config`: our configuration under DeepSpeed's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, get_args

from offload.errors import ConfigError
from zero.compat.monitoring import BLOCKS, DeepSpeedMonitorConfig
from zero.config import load_config, reading_as_deepspeed
from zero.config.precision_block import Bf16Config, Fp16Config

# Values of `optimizer.type` that DeepSpeed lists and that work here; any class of torch.optim works too.
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]
# DeepSpeed's attribute of a configuration -> the block of the JSON.
BLOCKS_BY_NAME = {"bfloat16_config": "bf16", "float16_config": "fp16"} | {
    f"{block}_config": block
    for block in (
        *("activation_checkpointing", "aio", "autotuning", "checkpoint", "compile", "flops_profiler", "hybrid_engine"),
        *("nebula", "tensor_parallel", "timers", "weight_quantization"),
    )
}


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
        self.zero_config, self.zero_optimization_stage, self.zero_enabled = zero, zero.stage, zero.stage > 0
        self._param_dict = dict(self.config._report.source)
        logs = self._block("comms_logger")
        self.comms_config = SimpleNamespace(comms_logger=logs, comms_logger_enabled=logs.enabled)
        self.monitor_config = DeepSpeedMonitorConfig(**{name: getattr(self.config, name) for name in BLOCKS})

    def __getattr__(self, name: str) -> Any:
        """Keys of the configuration, and DeepSpeed's names of its blocks."""
        if name.startswith("_") or name == "config":
            raise AttributeError(name)
        return self._block(BLOCKS_BY_NAME[name]) if name in BLOCKS_BY_NAME else getattr(self.config, name)

    def _block(self, name: str) -> Any:
        """A block of the configuration; one that was not given has its defaults, and is disabled."""
        given = getattr(self.config, name)
        if given is not None:
            return given
        kind = get_args(type(self.config).model_fields[name].annotation)[0]
        return kind(**({"enabled": False} if "enabled" in kind.model_fields else {}))
