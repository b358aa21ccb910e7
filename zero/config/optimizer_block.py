"""The `optimizer` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from zero.config.fields import (
    Block,
    Flag,
    InertFlag,
    Number,
    Only,
    problem,
    reads,
)
from zero.config.sizes import parse_number

OPTIMIZER_TYPES = {"adam": "Adam", "adamw": "AdamW", "deepspeedcpuadam": "Adam", "fusedadam": "Adam"}


def _parse_betas(value: object) -> tuple[float, float]:
    expected = "two numbers, each at least 0 and less than 1"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(expected)
    first, second = parse_number(value[0]), parse_number(value[1])
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(expected)
    return first, second


def _other_optimizer(owner: str) -> Only:
    return Only((), f"it belongs to {owner}, which is not available; remove it")


_ONE_BIT = Annotated[Any, _other_optimizer("the 1-bit and 0/1 optimizers")]
_LAMB = Annotated[Any, _other_optimizer("LAMB")]
_SGD = Annotated[Any, _other_optimizer("SGD and Muon")]


class OptimizerParams(Block):
    """`optimizer.params` of Adam and AdamW; defaults as in DeepSpeed (weight_decay 0)."""

    why: ClassVar[str] = "it chooses among implementations, and there is one here, bit-equal on every tier"

    aliases: ClassVar[Mapping[str, str]] = {"adamw_mode": "adam_w_mode"}

    lr: Annotated[Number, Field(ge=0)] = 1e-3
    betas: Annotated[tuple[float, float], reads(_parse_betas)] = (0.9, 0.999)
    eps: Annotated[Number, Field(ge=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    adam_w_mode: Flag = True
    """Decay the weights, not the gradients; "AdamW" does so whatever this says."""
    bias_correction: Annotated[Flag, Only((True,), "Adam always corrects its bias; set it to true")] = True
    amsgrad: Annotated[Flag, Only((False,), "AMSGrad is not available; set it to false")] = False
    maximize: Annotated[Flag, Only((False,), "negate the loss instead")] = False
    fp32_optimizer_states: Annotated[Flag, Only((True,), "moments are fp32; set it to true")] = True
    torch_adam: InertFlag = None
    fused: InertFlag = None
    foreach: InertFlag = None
    capturable: InertFlag = None
    differentiable: InertFlag = None
    set_grad_none: InertFlag = None
    max_grad_norm: Annotated[Any, Only((), 'use the top-level key "gradient_clipping"')] = None
    freeze_step: _ONE_BIT = None
    var_freeze_step: _ONE_BIT = None
    var_update_scaler: _ONE_BIT = None
    local_step_scaler: _ONE_BIT = None
    local_step_clipper: _ONE_BIT = None
    cuda_aware: _ONE_BIT = None
    comm_backend_name: _ONE_BIT = None
    coeff_beta: _ONE_BIT = None
    factor_max: _ONE_BIT = None
    factor_min: _ONE_BIT = None
    factor_threshold: _ONE_BIT = None
    max_coeff: _LAMB = None
    min_coeff: _LAMB = None
    momentum: _SGD = None
    dampening: _SGD = None
    nesterov: _SGD = None
    muon_lr: _SGD = None
    adam_lr: _SGD = None
    ns_method: _SGD = None


def _parse_optimizer_type(value: object) -> str:
    name = OPTIMIZER_TYPES.get(value.lower()) if isinstance(value, str) else None
    if name is None:
        raise problem('"Adam" or "AdamW"', fix="other optimizers are not available; use one of these")
    return name


class OptimizerConfig(Block):
    """`optimizer`: made by the engine; absent if the caller hands over a torch optimizer."""

    why: ClassVar[str] = "it chooses among implementations, and there is one here, bit-equal on every tier"

    type: Annotated[Literal["Adam", "AdamW"], reads(_parse_optimizer_type)] = "AdamW"
    params: OptimizerParams = OptimizerParams()
    legacy_fusion: InertFlag = None

    @property
    def decoupled_weight_decay(self) -> bool:
        """True for AdamW's rule; as in DeepSpeed, "Adam" follows it too unless adam_w_mode is false."""
        return self.type == "AdamW" or self.params.adam_w_mode
