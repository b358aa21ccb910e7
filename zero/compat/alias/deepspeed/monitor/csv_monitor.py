"""`deepspeed.monitor.csv_monitor`."""

from zero.compat.monitoring import csvMonitor

__all__ = ["csvMonitor"]
