"""`deepspeed.monitor.comet`."""

from zero.compat.monitoring import CometMonitor

__all__ = ["CometMonitor"]
