"""`deepspeed.runtime.zero.tiling`."""

from zero.params.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
