"""`deepspeed.monitor.config`."""

from zero.compat.monitoring import DeepSpeedMonitorConfig, get_monitor_config

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]
