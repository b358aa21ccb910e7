"""`deepspeed.runtime.config`."""

from zero.compat.configs import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    DEEPSPEED_OPTIMIZERS,
    LION_OPTIMIZER,
    DeepSpeedConfig,
    DeepSpeedConfigError,
    ZeroStageEnum,
)

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "LION_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "ZeroStageEnum",
]
