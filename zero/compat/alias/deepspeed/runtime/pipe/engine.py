"""`deepspeed.runtime.pipe.engine`."""

from zero.compat.unavailable import PipelineEngine

__all__ = ["PipelineEngine"]
