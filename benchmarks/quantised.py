"""A mixture of experts whose base is frozen 4-bit codes, with low-rank adapters on attention: built, not loaded.

Two codes a byte and a bf16 scale for 64 weights, decoded where they are used. The codes are random: what matters here
is which bytes move. Experts stay packed as transformers packs them, so they are fetched by rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALED = 64
"""Weights that share a scale."""
RANK = 16
"""Of the adapters."""
IMPLEMENTATION = "zero_benchmark_codes"
STD = 0.02


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """(out, in / 2) uint8 and (out, in / 64) to (out, in) of the scales' dtype."""
    values = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, SCALED)
    return ((values.to(scales.dtype) - 7.5) * scales.unsqueeze(-1)).view(codes.shape[0], -1)


class _Decoded(torch.autograd.Function):
    """A linear map whose weight exists while it is used: backward decodes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, decode(codes, scales))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ decode(*ctx.saved_tensors), None, None


class CodedLinear(nn.Module):
    """nn.Linear without a bias over codes, and an adapter beside it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.codes, self.scales = coded(out_features, in_features)
        self.down = nn.Linear(in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        base: Tensor = _Decoded.apply(x, self.codes, self.scales)
        adapted: Tensor = self.up(self.down(x))
        return base + adapted


def coded(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Random codes and scales of a weight of that shape, as large as trained ones."""
    *rows, width = shape
    codes = torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8)
    scales = torch.full((*rows, width // SCALED), STD / 4.6, dtype=torch.bfloat16)
    return nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)


def coded_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Transformers' loop over the experts that tokens have chosen, with decoded weights."""
    output = torch.zeros_like(hidden)
    for index in chosen[chosen < experts.num_experts].unique().tolist():  # type: ignore[no-untyped-call]
        token, place = torch.where(chosen == index)
        gate, up = _Decoded.apply(hidden[token], experts.gate_up_proj[index], experts.gate_up_scale[index]).chunk(2, -1)
        value = _Decoded.apply(
            experts.act_fn(gate) * up, experts.down_proj[index], experts.down_scale[index]
        ) * weights[token, place, None].to(hidden.dtype)
        output.index_add_(0, token, value)
    return output


def lora_over_codes(config: Any) -> nn.Module:
    """The model of a Hugging Face config (experts packed, as Qwen3-MoE's) with everything frozen but the adapters."""
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, coded_experts)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config._experts_implementation_internal = IMPLEMENTATION
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not model.lm_head:
                setattr(module, name, CodedLinear(child.in_features, child.out_features))
            elif hasattr(child, "gate_up_proj"):
                setattr(module, name, _coded_experts_of(child))
            elif "RotaryEmbedding" in type(child).__name__:
                setattr(module, name, type(child)(config))
    _materialise(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def _coded_experts_of(experts: Any) -> nn.Module:
    """An experts module like the given one over codes; made by a constructor, so that its values go to their place."""

    class CodedExperts(type(experts)):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.__dict__.update({name: v for name, v in vars(experts).items() if name not in self.__dict__})
            self.act_fn = experts.act_fn
            self.gate_up_proj, self.gate_up_scale = coded(*experts.gate_up_proj.shape)
            self.down_proj, self.down_scale = coded(*experts.down_proj.shape)

    return CodedExperts()


def _materialise(model: nn.Module) -> None:
    """Random frozen values for what is on the meta device still: embeddings, norms, routers."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                values = values.fill_(1.0) if parameter.dim() == 1 else values.normal_(0.0, STD)
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
