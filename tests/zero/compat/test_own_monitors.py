"""A script's own monitors, by DeepSpeed's names, write what our engine's write, from the first rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from zero.compat import monitoring
from zero.compat.configs import DeepSpeedConfig
from zero.dist import world

EVENTS = [("Valid/accuracy", 0.5, 8), ("Valid/accuracy", 0.75, 16)]


def config(folder: Path, **more: Any) -> Any:
    block = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": block, **more}).monitor_config


def written(folder: Path) -> list[str]:
    return (folder / "job" / "Valid_accuracy.csv").read_text().split()


@pytest.mark.parametrize("kind", ["master", "one"])
def test_events_are_written_to_what_is_enabled(tmp_path: Path, kind: str) -> None:
    blocks = config(tmp_path, wandb={"enabled": False})
    if kind == "master":
        monitor: Any = monitoring.MonitorMaster(blocks)
        assert monitor.enabled and monitor.csv_monitor is not None and monitor.wandb_monitor is None
    else:
        monitor = monitoring.csvMonitor(blocks.csv_monitor)
        assert monitor.enabled and monitor.job_name == "job" and monitor.output_path == str(tmp_path)
    monitor.write_events(EVENTS)
    assert written(tmp_path) == ["step,accuracy", "8,0.5", "16,0.75"]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "rank", lambda: 1)
    monitor = monitoring.MonitorMaster(config(tmp_path))
    monitor.write_events(EVENTS)
    assert monitor.enabled and monitor.csv_monitor is None and not list(tmp_path.iterdir())


def test_without_blocks_all_are_off() -> None:
    blocks = DeepSpeedConfig({"train_batch_size": 1}).monitor_config
    assert not blocks.enabled and not monitoring.MonitorMaster(blocks).enabled
    assert monitoring.WandbMonitor(blocks.wandb).project == "deepspeed"
    assert not monitoring.CometMonitor(monitoring.get_monitor_config({"comet": None}).comet).enabled


def test_an_unknown_block_and_a_missing_package_are_errors_that_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"got wanbd"):
        monitoring.DeepSpeedMonitorConfig(wanbd={})
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ConfigError, match=r"comet\.enabled: the package comet_ml is not installed"):
        monitoring.MonitorMaster(monitoring.DeepSpeedMonitorConfig(comet={"enabled": True}))
