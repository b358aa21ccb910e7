"""`deepspeed.runtime.zero`."""

from zero.compat.helpers import unwrap_model_for_generation
from zero.compat.partition_parameters import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from zero.params.tiled_linear import TiledLinear, TiledLinearReturnBias

from ..._names import attributes

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
__getattr__ = attributes(__name__)
