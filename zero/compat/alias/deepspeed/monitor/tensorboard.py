"""`deepspeed.monitor.tensorboard`."""

from zero.compat.monitoring import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
