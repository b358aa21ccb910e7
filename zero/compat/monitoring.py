"""`deepspeed.monitor`: monitors that a script makes itself, under DeepSpeed's names, over `zero.assembly.monitors`.

monitor = MonitorMaster(DeepSpeedConfig("ds_config.json").monitor_config)
monitor.write_events([("Valid/accuracy", 0.5, samples)])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.assembly.monitors import Monitors
from zero.config.logging_block import Comet, CsvMonitor, TensorBoard, Wandb
from zero.dist import world

BLOCKS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "comet": Comet, "wandb": Wandb, "csv_monitor": CsvMonitor}


class DeepSpeedMonitorConfig:
    """The four monitor blocks of a configuration; a missing one is disabled.

    Raises ValueError: an unknown key, or an unknown name of a block. `blocks`: name -> its keys, or the block itself.
    """

    def __init__(self, **blocks: Any) -> None:
        if unknown := sorted(set(blocks) - set(BLOCKS)):
            raise ValueError(f"DeepSpeedMonitorConfig: expected {', '.join(BLOCKS)}, got {', '.join(unknown)}")
        self.tensorboard = _read_block("tensorboard", blocks)
        self.comet = _read_block("comet", blocks)
        self.wandb = _read_block("wandb", blocks)
        self.csv_monitor = _read_block("csv_monitor", blocks)

    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in BLOCKS)


def _read_block(name: str, blocks: Mapping[str, Any]) -> Any:
    block = blocks.get(name)
    if block is None:
        block = {}
    return BLOCKS[name](**block) if isinstance(block, Mapping) else block


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in BLOCKS if name in param_dict})


class MonitorMaster(Monitors):
    """All enabled monitors; the first rank writes, others write nothing.

    Raises ConfigError: one is enabled and its package is not installed. `monitor_config`:
    `DeepSpeedConfig(...).monitor_config`.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config, writes=world.rank() == 0)
        self.monitor_config = monitor_config
        self.tb_monitor = self.writers.get("tensorboard")
        self.comet_monitor = self.writers.get("comet")
        self.wandb_monitor = self.writers.get("wandb")
        self.csv_monitor = self.writers.get("csv_monitor")


class _SingleMonitor(Monitors):
    """One monitor; its keys are attributes. Raises ConfigError: as `MonitorMaster`.

    `monitor_config`: its block, `DeepSpeedConfig(...).monitor_config.wandb` and the like.
    """

    name: str

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(DeepSpeedMonitorConfig(**{self.name: monitor_config}), writes=world.rank() == 0)
        self.monitor_config = monitor_config

    def __getattr__(self, name: str) -> Any:
        """Keys of the block, then attributes of its writer, such as `experiment`."""
        if name.startswith("__") or name in ("monitor_config", "writers"):
            raise AttributeError(name)
        writer = self.writers.get(self.name)
        return getattr(self.monitor_config if name in type(self.monitor_config).model_fields else writer, name)


def _make_class(name: str, block: str) -> type[_SingleMonitor]:
    return type(name, (_SingleMonitor,), {"name": block, "__doc__": _SingleMonitor.__doc__, "__module__": __name__})


TensorBoardMonitor = _make_class("TensorBoardMonitor", "tensorboard")
WandbMonitor = _make_class("WandbMonitor", "wandb")
csvMonitor = _make_class("csvMonitor", "csv_monitor")
CometMonitor = _make_class("CometMonitor", "comet")
