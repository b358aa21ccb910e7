"""Pipelines: a model as a list of layers, cut into stages that different ranks run; DeepSpeed's names and arguments."""

from zero.pipe.module import PipelineModule
from zero.pipe.specs import LayerSpec, TiedLayerSpec
from zero.pipe.topology import PipeDataParallelTopology, ProcessTopology

__all__ = ["LayerSpec", "PipeDataParallelTopology", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
