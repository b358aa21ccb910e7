"""`hybrid_engine` and `pipeline`: how an engine generates between steps, and how the stages of a model take turns."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zero.config.fields import (
    ConfigBlock,
    Flag,
    Inert,
    InertAny,
    InertFlag,
    InertInteger,
    InertText,
    Integer,
    Only,
)


class HybridEngine(ConfigBlock):
    """`hybrid_engine`: `engine.generate()` keeps all units that the memory which is free now has room for."""

    why = "the model generates with its own modules: no kernels are injected, and there are no tensor-parallel ranks"

    enabled: Flag = False
    max_out_tokens: Annotated[Integer, Field(ge=1)] = 512
    """Tokens of a sequence, its prompt included, for which memory is left to the cache of keys and values."""
    release_inference_cache: Flag = False
    """Let the units go when `generate` returns; else they stay for the next call, until a forward with gradients."""
    inference_tp_size: Annotated[
        Integer,
        Only((1, 0), "tensor parallelism is not available; set it to 1: the engine streams weights that do not fit"),
    ] = 1
    pin_parameters: Annotated[Flag | None, Inert("the engine pins host memory wherever that makes copies faster")] = (
        None
    )
    tp_gather_partition_size: InertInteger = None
    enable_cuda_graph: InertFlag = None


class Pipeline(ConfigBlock):
    """Of a `zero.pipe.PipelineModule`; other models do not read it."""

    is_open = True

    why: ClassVar[str] = "the arguments of PipelineModule decide this; tensors between stages are always sent whole"

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of micro-batches on a stage: "1f1b" keeps at most as many of them as there are stages ahead; "gpipe" runs
    all forwards first."""
    stages: InertAny = None
    partition: InertText = None
    seed_layers: InertFlag = None
    activation_checkpoint_interval: Integer = 0
    """Number of layers in one activation checkpoint, instead of the argument of PipelineModule; 0: as that says."""
    pipe_partitioned: InertFlag = None
    grad_partitioned: InertFlag = None
    use_reentrant: InertFlag = None
