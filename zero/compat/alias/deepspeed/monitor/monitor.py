"""`deepspeed.monitor.monitor`."""

from zero.compat.unavailable import MonitorMaster

__all__ = ["MonitorMaster"]
