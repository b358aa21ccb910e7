"""Pipelines: a model is a list of layers, split into stages on different ranks. DeepSpeed's names and arguments."""

from zero.models.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec
from zero.models.pipeline_topology import PipeDataParallelTopology, ProcessTopology

__all__ = ["LayerSpec", "PipeDataParallelTopology", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
