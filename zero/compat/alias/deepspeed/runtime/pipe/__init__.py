"""`deepspeed.runtime.pipe`."""

from zero.compat.unavailable import LayerSpec, PipelineModule, TiedLayerSpec

from ..._names import attributes

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
__getattr__ = attributes(__name__)
