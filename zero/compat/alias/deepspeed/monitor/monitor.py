"""`deepspeed.monitor.monitor`."""

from zero.compat.monitoring import CometMonitor, MonitorMaster, TensorBoardMonitor, WandbMonitor, csvMonitor

__all__ = ["CometMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
