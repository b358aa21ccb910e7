"""`bf16`, `fp16`, `torch_autocast` and `data_types`: what is kept and computed in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Integer, Number, problem, reads
from zero.config.inactive_keys import inactive_keys

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_SPELLINGS = {
    "fp32": ("fp32", "float32", "torch.float32", "float", "torch.float"),
    "fp16": ("fp16", "float16", "torch.float16", "half", "torch.half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


def parse_dtype(value: object) -> str:
    """The name of a dtype that is given as one, or as a word; anything else raises ValueError."""
    for name, spellings in _SPELLINGS.items():
        if str(value).lower() in spellings:
            return name
    raise ValueError('"fp32", "fp16" or "bf16"')


_Dtype = Annotated[Literal["fp32", "fp16", "bf16"], reads(parse_dtype)] | None


class Bf16Config(ConfigBlock):
    """`bf16`: 16-bit weights with fp32 master; off means fp32 throughout."""

    rows = inactive_keys("bf16")

    enabled: Flag = False
    check_grad_overflow: Flag = True
    """A step whose gradients are not finite is skipped. False: it is taken, as torch takes it."""
    bf16_master_weights_and_grads: Flag = False
    """Weights are their own masters, rounded up or down at random, and gradients are added up in bf16."""
    bf16_optimizer_states: Flag = False
    """The same as zero_optimization.offload_optimizer.state_dtype "bf16", while bf16 is enabled."""

    aliases: ClassVar[Mapping[str, str]] = {"check_overflow": "check_grad_overflow"}


class Fp16Config(ConfigBlock):
    """`fp16`: 16-bit weights with fp32 master, and a loss scale."""

    rows = inactive_keys("fp16")

    enabled: Flag = False
    auto_cast: Flag = False
    """Floating tensors among the positional arguments of the engine's forward are cast to fp16."""
    loss_scale: Annotated[Number, Field(ge=0)] = 0.0
    """0: dynamic; else static."""
    initial_scale_power: Annotated[Integer, Field(ge=0, le=126)] = 16
    """The dynamic scale begins at 2 to this."""
    loss_scale_window: Annotated[Integer, Field(ge=0)] = 1000
    """The dynamic scale doubles after so many steps without an overflow."""
    hysteresis: Annotated[Integer, Field(ge=1)] = 2
    """How many overflows it takes until the dynamic scale is halved."""
    consecutive_hysteresis: Flag = False
    """A step without overflow restores the hysteresis; else only a growing scale does."""
    min_loss_scale: Annotated[Number, Field(ge=0)] = 1.0
    """An overflow at this dynamic scale ends the run."""

    @property
    def dynamic(self) -> bool:
        """True: the scale follows the overflows."""
        return self.loss_scale == 0

    @model_validator(mode="after")
    def _check_dynamic_scale(self) -> Self:
        for key in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.dynamic and getattr(self, key) <= 0:
                fix = "the loss scale is dynamic; for a static one, set loss_scale above 0"
                raise problem("more than 0", at=key, got=f"{getattr(self, key)}", fix=fix)
        return self


def _parse_autocast_dtype(value: object) -> str:
    if str(value).lower() not in (*_SPELLINGS["bf16"], *_SPELLINGS["fp16"]):
        raise ValueError('"bfloat16" or "float16"')
    return parse_dtype(value)


class TorchAutocast(ConfigBlock):
    """`torch_autocast`: the engine's forward runs under torch.autocast; weights stay what they are."""

    rows = inactive_keys("torch_autocast")

    is_open = True

    enabled: Flag = False
    dtype: Annotated[Literal["bf16", "fp16"], reads(_parse_autocast_dtype)] | None = None
    """None: torch's own choice for the device. With fp16 the loss is scaled as torch.amp.GradScaler does."""


class DataTypes(ConfigBlock):
    """`data_types`."""

    rows = inactive_keys("data_types")

    is_open = True

    grad_accum_dtype: _Dtype = None
    """What several contributions to a gradient are added up in; None, and what is not the weights' dtype: fp32."""
    param_dtype: _Dtype = None
    """Nothing but what bf16.enabled, fp16.enabled or neither (fp32) says already."""
    buffer_dtype: _Dtype = None
    """With bf16 or fp16: what floating buffers become; None: they keep their dtype. Those of quantised storage do
    whatever this says."""
