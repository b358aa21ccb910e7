"""`deepspeed.runtime.precision_config`."""

from zero.compat.configs import get_bfloat16_config, get_float16_config
from zero.config.precision_block import Bf16Config as DeepSpeedBF16Config
from zero.config.precision_block import Fp16Config as DeepSpeedFP16Config

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"]
