"""Monitors that record a run's numbers: CSV files, TensorBoard, Weights & Biases, Comet. Only the first rank writes."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from offload.errors import ConfigError
from offload.system.regular_files import open_regular
from zero.config.logging_block import Comet, CsvMonitor, TensorBoard, Wandb

MonitorEvent = tuple[str, float, int]  # (tag, value, number of samples that steps have used so far).


class Monitor(Protocol):
    """One monitor."""

    def write_events(self, events: Sequence[MonitorEvent]) -> None:
        """Write events permanently."""

    def close(self) -> None:
        """End writing; by default there is nothing to end."""


class CsvFiles(Monitor):
    """A file for each tag, such as `Train_Samples_lr.csv`, with a row for each event; existing files are continued."""

    def __init__(self, block: CsvMonitor) -> None:
        self.folder = Path(block.output_path) / block.job_name
        self.folder.mkdir(parents=True, exist_ok=True)

    def write_events(self, events: Sequence[MonitorEvent]) -> None:
        for tag, value, samples in events:
            path = self.folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # others may write to the folder, too
            with os.fdopen(open_regular(path, flags, 0o666), "a", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", tag.rpartition("/")[2]])
                rows.writerow([samples, value])


class TensorBoardFiles(Monitor):
    def __init__(self, block: TensorBoard) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self.writer = tensorboard.SummaryWriter(log_dir=str(Path(block.output_path) / block.job_name))

    def write_events(self, events: Sequence[MonitorEvent]) -> None:
        for event in events:
            self.writer.add_scalar(*event)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbRun(Monitor):
    """A run of Weights & Biases; if the process already has one, that run.

    It ends with the process, since it may belong to the script or to another engine.
    """

    def __init__(self, block: Wandb) -> None:
        self.wandb = importlib.import_module("wandb")
        if self.wandb.run is None:
            self.wandb.init(project=block.project, group=block.group, entity=block.team)

    def write_events(self, events: Sequence[MonitorEvent]) -> None:
        for tag, value, samples in events:
            self.wandb.log({tag: value}, step=samples)


class CometExperiment(Monitor):
    """An experiment of Comet; for each tag, one value every `samples_log_interval` samples."""

    def __init__(self, block: Comet) -> None:
        comet = importlib.import_module("comet_ml")
        keys = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self.experiment = comet.start(**{key: getattr(block, key) for key in keys})
        if block.experiment_name is not None:
            self.experiment.set_name(block.experiment_name)
        self.interval, self.last = block.samples_log_interval, dict[str, int]()

    def write_events(self, events: Sequence[MonitorEvent]) -> None:
        for tag, value, samples in events:
            if tag not in self.last or samples - self.last[tag] >= self.interval:
                self.last[tag] = samples
                self.experiment.log_metric(tag, value, step=samples)

    def close(self) -> None:
        self.experiment.flush()


# Block -> (the package that it needs, its monitor).
KINDS: dict[str, tuple[str | None, type[Any]]] = {
    "tensorboard": ("tensorboard", TensorBoardFiles),
    "wandb": ("wandb", WandbRun),
    "csv_monitor": (None, CsvFiles),
    "comet": ("comet_ml", CometExperiment),
}


class Monitors:
    """All enabled monitors; `engine.monitor`.

    Raises ConfigError: one is enabled and its package is not installed. A warning would not be enough: users would
    notice missing numbers only after the run.

    Args:
        config: has the four blocks as attributes; None: no such block.
        writes: this rank writes. The packages are checked on every rank.
    """

    def __init__(self, config: Any, *, writes: bool) -> None:
        blocks = {name: getattr(config, name) for name in KINDS}
        enabled = {name: block for name, block in blocks.items() if block is not None and block.enabled}
        for name in enabled:
            package = KINDS[name][0]
            if package is not None and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{name}.enabled: the package {package} is not installed; pip install {package}, or set it to false"
                )
        self.enabled = bool(enabled)
        self.writers: dict[str, Monitor] = {}
        for name, block in enabled.items() if writes else ():
            self.writers[name] = KINDS[name][1](block)

    def write_events(self, event_list: Sequence[MonitorEvent]) -> None:
        """Write (tag, value, samples) to all monitors; does nothing on ranks that do not write."""
        for writer in self.writers.values():
            writer.write_events(event_list)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
