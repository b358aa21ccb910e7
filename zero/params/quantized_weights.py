"""A Linear layer whose weight is kept as codes of 4 or 8 bits and decoded at each use.

[Format] The weight is cut into groups of `group_size` elements along its rows (`group_dim` 1) or its columns (0). Each
group has a step and a least value in fp16, rounded so that they enclose all values, and a code q for each value:
value = least + q * step. A symmetric group has only the step: value = (q - half) * step, where half is 8 or 128. A byte
holds two codes of 4 bits, the first in the low bits. [Source: group-wise quantisation of DeepSpeed's ZeRO-Inference]

Codes, steps and least values are frozen parameters: an engine moves, stores and saves them like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.errors import ConfigError
from zero.config.quantization_block import Codes

# ---- quantized storage ---------------------------------------------------------------------------------------------
# Quantised storage: packed codes and the tensors that decode them are moved as bytes and never cast.
#
# Codes are integers or 8-bit floats, or they have the dtype of bitsandbytes' `bnb_4bit_quant_storage`: a parameter with
# a `quant_state` counts as codes. Other tensors in the same module (scales, zero points) decode the codes and need
# their original precision, so they keep their dtype where other frozen tensors take the compute dtype. A bias is part
# of the computation and takes the compute dtype too. A tensor subclass that wraps other tensors is moved as these
# tensors.


_CODES = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32))
_NOT_DECODING = frozenset(("bias",))
"""Names of tensors in modules with packed codes that are added to activations instead of decoding."""


def is_packed(tensor: torch.Tensor) -> bool:
    """True for codes of a quantised weight; False for counters and masks (0-d, bool, int64)."""
    if getattr(tensor, "quant_state", None) is not None:
        return True
    eight_bit_float = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.dim() > 0 and (tensor.dtype in _CODES or eight_bit_float)


def has_packed_tensors(module: nn.Module) -> bool:
    """True if a parameter or buffer of the module itself is packed."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and (is_wrapper(tensor) or is_packed(tensor)) for tensor in own)


def quantized_tensor_names(module: nn.Module) -> frozenset[str]:
    """Names of the module's own tensors that belong to quantised storage and keep their dtype."""
    if not has_packed_tensors(module):
        return frozenset()
    return frozenset(name for name in (*module._parameters, *module._buffers) if name not in _NOT_DECODING)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass that holds its bytes in other tensors (for example torchao's)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, plain tensor) of all tensors inside a wrapper, recursively; a plain tensor gives itself."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from inner_tensors(getattr(tensor, attribute), f"{name}.{attribute}")


def quantized_state_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """As `quantized_tensor_names`, for a whole state dict (meta tensors will do)."""
    modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if is_packed(tensor)}
    parts = ((name, *name.rpartition(".")[::2]) for name in tensors)
    return {name for name, module, own in parts if module in modules and own not in _NOT_DECODING}


CHUNK_NUMEL = 8 << 20
"""Elements that are decoded at once in fp32."""


class QuantizedLinear(nn.Module):
    """Replaces an `nn.Linear`. The codes are not trained; its input and its bias get gradients.

    Args:
        in_features, out_features: as in `nn.Linear`.
        codes: how the weight is coded.
        dtype: dtype of the decoded weight.
        bias: the layer's own parameter, or None.

    Attributes:
        packed: (out_features, in_features * num_bits / 8), uint8.
        steps, least: fp16, of shape `codes.group_shape`; `least` is None where symmetric.
    """

    least: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        codes: Codes,
        *,
        dtype: torch.dtype = torch.float32,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        wrong = codes.why_not(out_features, in_features)
        if wrong:
            raise ConfigError(f"QuantizedLinear of ({out_features}, {in_features}): {wrong}")
        self.in_features = in_features
        self.out_features = out_features
        self.codes = codes
        self.dtype = dtype
        shape = codes.group_shape(out_features, in_features)
        nbytes = in_features * codes.num_bits // 8

        def make_frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.packed = make_frozen(out_features, nbytes, dtype=torch.uint8)
        self.steps = make_frozen(*shape, dtype=torch.float16)
        self.register_parameter("least", None if codes.symmetric else make_frozen(*shape, dtype=torch.float16))
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, codes: Codes) -> QuantizedLinear:
        """The same layer with a coded weight and the same bias parameter. The weight's values must be present.

        Raises ConfigError: the shape cannot be cut into such groups, or a value is not finite or beyond fp16's range.
        """
        weight = linear.weight.detach()
        layer = cls(
            linear.in_features, linear.out_features, codes, dtype=weight.dtype, bias=linear.bias, device=weight.device
        )
        packed, steps, least = encode(weight, codes)
        for parameter, values in ((layer.packed, packed), (layer.steps, steps), (layer.least, least)):
            if parameter is not None and values is not None:
                parameter.data.copy_(values)
        return layer.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The decoded weight, (out_features, in_features), computed at each access."""
        return decode(self.packed.detach(), self.steps.detach(), self._least, self.codes, self.dtype)

    @property
    def _least(self) -> Tensor | None:
        return None if self.least is None else self.least.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        if torch.is_grad_enabled() and x.requires_grad:
            # With F.linear alone, autograd would keep the decoded weight until backward: four times the codes' size.
            y: Tensor = _Product.apply(x, self.packed, self.steps, self.least, self.codes)  # type: ignore[no-untyped-call]
        else:
            y = F.linear(x, decode(self.packed, self.steps, self.least, self.codes, x.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        codes = self.codes
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"num_bits={codes.num_bits}, group_size={codes.group_size}, symmetric={codes.symmetric}"
        )


class _Product(torch.autograd.Function):
    """x times the transpose of a coded weight; the backward decodes it once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, steps: Tensor, least: Tensor | None, codes: Codes) -> Tensor:
        ctx.save_for_backward(packed, steps, least)
        ctx.codes = codes
        return F.linear(x, decode(packed, steps, least, codes, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        packed, steps, least = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ decode(packed, steps, least, ctx.codes, gradient.dtype), None, None, None, None


# ---- numbers -----------------------------------------------------------------------------------


def encode(weight: Tensor, codes: Codes) -> tuple[Tensor, Tensor, Tensor | None]:
    """(packed, steps, least) of a weight, see the format above. Raises ConfigError as `QuantizedLinear.from_linear`."""
    if not bool(torch.isfinite(weight).all()):
        raise ConfigError("the weight to be quantised has values that are inf or NaN")
    values = _split_groups(weight.float(), codes)
    axis = 2 if codes.group_dim == 1 else 1
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
    if codes.symmetric:
        # Codes reach from `half` steps below zero to `half` - 1 steps above it.
        least = None
        steps = _round_to_half(torch.maximum(high / (codes.half - 1), -low / codes.half), up=True)
        q = values / _replace_zeros(steps.float()) + codes.half
    else:
        least = _round_to_half(low, up=False)
        steps = _round_to_half((high - least.float()) / codes.largest, up=True)
        q = (values - least.float()) / _replace_zeros(steps.float())
    integers = q.round_().clamp_(0, codes.largest).to(torch.uint8).view(weight.shape)
    if not all(bool(torch.isfinite(part).all()) for part in (steps, *([] if least is None else [least]))):
        raise ConfigError(
            "the weight to be quantised has values outside the range of fp16; leave the layer out, or scale its weight"
        )
    return _pack(integers, codes.num_bits), steps.squeeze(axis), None if least is None else least.squeeze(axis)


def decode(packed: Tensor, steps: Tensor, least: Tensor | None, codes: Codes, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, computed in fp32, some rows at a time."""
    rows, columns = packed.shape[0], packed.shape[1] * 8 // codes.num_bits
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    for begin, end in _row_runs(rows, columns, codes):
        q = _split_groups(_unpack(packed[begin:end], codes.num_bits).float(), codes)
        step = _select_rows(steps, begin, end, codes)
        values = (q - codes.half) * step if least is None else q * step + _select_rows(least, begin, end, codes)
        out[begin:end] = values.view(end - begin, columns)
    return out


def _row_runs(rows: int, columns: int, codes: Codes) -> Iterator[tuple[int, int]]:
    """[begin, end) of rows that are decoded together; groups along columns are not cut."""
    multiple = codes.group_size if codes.group_dim == 0 else 1
    height = max(CHUNK_NUMEL // max(columns, 1) // multiple, 1) * multiple
    for begin in range(0, rows, height):
        yield begin, min(begin + height, rows)


def _select_rows(parts: Tensor, begin: int, end: int, codes: Codes) -> Tensor:
    """The part of steps or least values for rows [begin, end), fp32, in a shape that broadcasts to `_split_groups`."""
    if codes.group_dim == 1:
        return parts[begin:end].float().unsqueeze(2)
    return parts[begin // codes.group_size : end // codes.group_size].float().unsqueeze(1)


def _split_groups(values: Tensor, codes: Codes) -> Tensor:
    """(rows, groups, group_size), or (groups, group_size, columns)."""
    rows, columns = values.shape
    if codes.group_dim == 1:
        return values.view(rows, columns // codes.group_size, codes.group_size)
    return values.view(rows // codes.group_size, codes.group_size, columns)


def _pack(integers: Tensor, num_bits: int) -> Tensor:
    return integers[:, 0::2] | (integers[:, 1::2] << 4) if num_bits == 4 else integers


def _unpack(packed: Tensor, num_bits: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1) if num_bits == 4 else packed


def _replace_zeros(steps: Tensor) -> Tensor:
    """Steps to divide by: 1 in place of 0, since the codes of groups with step 0 do not depend on it."""
    return torch.where(steps == 0, torch.ones_like(steps), steps)


def _round_to_half(values: Tensor, *, up: bool) -> Tensor:
    """fp16, rounded towards plus (`up`) or minus infinity."""
    nearest = values.half()
    wrong = nearest.float() < values if up else nearest.float() > values
    bits = nearest.view(torch.int16)
    # Neighbouring fp16 numbers have neighbouring bit patterns; for negative numbers they grow towards minus infinity.
    grows = torch.where(bits >= 0, 1, -1).to(torch.int16)
    return torch.where(wrong, bits + grows if up else bits - grows, bits).view(torch.float16)
