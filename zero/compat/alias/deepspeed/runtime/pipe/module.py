"""`deepspeed.runtime.pipe.module`."""

from zero.compat.unavailable import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
