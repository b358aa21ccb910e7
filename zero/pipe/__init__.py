"""Pipelines: a model is a list of layers, split into stages on different ranks. DeepSpeed's names and arguments."""

from zero.pipe.module import PipelineModule
from zero.pipe.specs import LayerSpec, TiedLayerSpec
from zero.pipe.topology import PipeDataParallelTopology, ProcessTopology

__all__ = ["LayerSpec", "PipeDataParallelTopology", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
