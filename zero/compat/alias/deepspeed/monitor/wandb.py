"""`deepspeed.monitor.wandb`."""

from zero.compat.monitoring import WandbMonitor

__all__ = ["WandbMonitor"]
