"""`deepspeed.runtime.base_optimizer`."""

from zero.optim.optimizer import ZeroOptimizer as DeepSpeedOptimizer
from zero.optim.optimizer import ZeroOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
