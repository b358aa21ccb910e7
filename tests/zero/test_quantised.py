"""Quantised bases under adapters: codes and scales are bytes that come and go, never cast, never trained.

The storages are written by hand after the libraries' own: a bitsandbytes-like Parameter subclass whose state hangs on
the parameter, a torchao-like tensor subclass, packed buffers, and codes and scales as frozen parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import reference_of, train
from models import GPT, LoraLinear, freeze, make_config, seeded, tokens
from pairwise import in_pairs
from reference import differences, snapshot
from torch import Tensor, nn

from offload.errors import ConfigError
from zero.params.quantized_weights import is_packed

Open = Callable[..., Any]
STEPS = 4


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and one fp32 scale a row, with bits that bf16 does not have."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def pack(codes: Tensor) -> Tensor:
    """uint8, flat, as bitsandbytes keeps them: the shape is gone."""
    return (codes.to(torch.int16) + 128).to(torch.uint8).flatten()


class Params8(nn.Parameter):
    """bitsandbytes-like: uint8 bytes whose shape and scales are attributes of the parameter."""

    quant_state: tuple[torch.Size, Tensor]

    def __new__(cls, data: Tensor, quant_state: tuple[torch.Size, Tensor]) -> Params8:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self


class MatMul8(torch.autograd.Function):
    """Keeps the packed parameter itself for backward, not a saved tensor, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Params8) -> Tensor:
        ctx.packed = packed
        return F.linear(x, MatMul8.weight(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ MatMul8.weight(ctx.packed, gradient.dtype), None

    @staticmethod
    def weight(packed: Params8, dtype: torch.dtype) -> Tensor:
        shape, scale = packed.quant_state
        codes = packed.detach().view(torch.uint8).view(shape)
        return ((codes.float() - 128) * scale).to(dtype)


class BytesOnParameter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        codes, scale = quantise(base.weight.detach())
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = Params8(pack(codes), (codes.shape, scale))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return MatMul8.apply(x, self.weight) + self.bias.to(x.dtype)


class FloatsOnParameter(BytesOnParameter):
    """The same bytes in a floating dtype, as `bnb_4bit_quant_storage` has them: some of them are no numbers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        weight = self.weight
        self.weight = Params8(weight.detach().as_subclass(Tensor).view(torch.float32), weight.quant_state)


class Buffers(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        codes, scale = quantise(base.weight.detach())
        self.in_features, self.out_features = base.in_features, base.out_features
        self.register_buffer("qweight", codes)
        self.register_buffer("scales", scale)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.scales.dtype is torch.float32, "a cast scale decodes other weights"
        return F.linear(x, (self.qweight.float() * self.scales).to(x.dtype), self.bias.to(x.dtype))


class FrozenParameters(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        codes, scale = quantise(base.weight.detach())
        self.in_features, self.out_features = base.in_features, base.out_features
        self.qweight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scale, requires_grad=False)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.qweight.float() * self.scales).to(x.dtype), self.bias.to(x.dtype))


class Int8Tensor(torch.Tensor):
    """torchao-like: looks like a float weight, holds codes and scales."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Int8Tensor:
        return cls(inner["qdata"], inner["scale"], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            dense = (weight.qdata.float() * weight.scale).to(x.dtype)
            return F.linear(x, dense, None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{func} on Int8Tensor")


class Wrapped(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        codes, scale = quantise(base.weight.detach())
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = nn.Parameter(Int8Tensor(codes, scale, torch.bfloat16), requires_grad=False)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias.to(x.dtype)


STORAGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bitsandbytes-like": BytesOnParameter,
    "torchao-like": Wrapped,
    "buffers": Buffers,
    "frozen parameters": FrozenParameters,
}
KINDS = {**STORAGES, "bitsandbytes-like, in floats": FloatsOnParameter}


def quantised(storage: str, *, bf16_base: bool = False) -> GPT:
    """A frozen GPT whose MLPs are quantised, with fp32 adapters on them and on the attention."""
    with seeded(0):
        model = GPT()
        freeze(model)
        if bf16_base:
            model.bfloat16()
        for block in model.blocks:
            block.up = KINDS[storage](block.up)
        for block in model.blocks:
            for part, name in ((block, "up"), (block.attention, "qkv")):
                setattr(part, name, Adapter(getattr(part, name)))
    return model


class Adapter(LoraLinear):
    """As PEFT: the adapter computes in its own dtype, the base in the input's."""

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x.to(self.low.dtype), self.low)
        return self.base(x) + F.linear(low, self.high).to(x.dtype)


def names_of(model: nn.Module) -> tuple[tuple[str, bool], ...]:
    """(name, trainable) of what is not quantised storage."""
    found = ((n, p.requires_grad) for n, p in model.named_parameters() if not is_storage(n))
    return tuple(found)


def is_storage(name: str) -> bool:
    return re.search(r"up\.base\.(weight|qweight|scales)$", name) is not None


@in_pairs(storage=STORAGES, bf16=(True, False), device=("none", "cpu", "nvme"), alias=(True, False))
def test_adapters_on_a_quantised_base_train_as_without_the_engine(
    open_engine: Open,
    nvme_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    bf16: bool,
    device: str,
    alias: bool,
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    model = quantised(storage, bf16_base=not bf16)
    names = names_of(model)
    engine = open_engine(model, make_config((device, device), nvme_path, bf16=bf16, clipping=0.3))
    train(engine, *range(STEPS))
    statistics = engine.statistics()
    assert statistics.gathered_bytes > 0
    assert all(releases >= STEPS for releases in statistics.releases_by_unit.values())
    plain = quantised(storage, bf16_base=not bf16)
    reference = reference_of(plain, bf16=bf16, clipping=0.3, opaque=is_storage)
    train(reference, *range(STEPS))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Every inner tensor of quantised parameters, by the name the engine knows it under."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if is_storage(name) and isinstance(parameter, Int8Tensor):
            found |= {f"{name}.qdata": parameter.qdata, f"{name}.scale": parameter.scale}
        elif is_storage(name):
            found[name] = parameter
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).contiguous().view(torch.uint8)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(
    "storage", ["bitsandbytes-like", "bitsandbytes-like, in floats", "torchao-like", "frozen parameters"]
)
def test_quantised_storage_keeps_every_bit_and_its_dtype(
    open_engine: Open, nvme_path: Any, storage: str, device: str
) -> None:
    before = {name: tensor.detach().clone() for name, tensor in stored(quantised(storage)).items()}
    engine = open_engine(quantised(storage), make_config((device, device), nvme_path))
    train(engine, *range(STEPS))
    assert len(before) >= 3
    for name, tensor in before.items():
        after = engine.full_parameter(name)
        assert after.dtype is tensor.dtype and torch.equal(bits(after), bits(tensor)), name
    opaque = [unit for unit in engine.units for slot in unit.slots if is_storage(slot.name.removesuffix(".qdata"))]
    assert opaque and not any(unit.trainable for unit in opaque)


@pytest.mark.parametrize("device", ["none", "nvme"])
@pytest.mark.parametrize("storage", STORAGES)
def test_quantised_storage_comes_back_from_a_checkpoint_bit_for_bit(
    open_engine: Open, nvme_path: Any, storage: str, device: str
) -> None:
    saves = nvme_path.parent / "saves"
    engine = open_engine(quantised(storage), make_config((device, device), nvme_path))
    train(engine, *range(STEPS))
    engine.save_checkpoint(saves)
    other = quantised(storage)
    with torch.no_grad():
        tensors = [*stored(other).values(), *(b for n, b in other.named_buffers() if is_storage(n))]
        for tensor in tensors:
            tensor.data.copy_(tensor.data.flip(0))
    again = open_engine(other, make_config((device, device), nvme_path))
    again.load_checkpoint(saves)
    names = [*names_of(quantised(storage)), *((name, False) for name in stored(quantised(storage)))]
    assert tensors and differences(snapshot(again, names), snapshot(engine, names)) == []
    assert torch.equal(again(tokens(9)), engine(tokens(9)))


def test_frozen_units_have_no_states_and_no_gradients_and_are_never_written(open_engine: Open, nvme_path: Any) -> None:
    """The disk receives the adapters' new states and weights and not a byte more."""
    engine = open_engine(quantised("frozen parameters"), make_config(("nvme", "nvme"), nvme_path))
    trained = [unit for unit in engine.units if unit.trainable]
    frozen = [unit for unit in engine.units if not unit.trainable]
    assert sum(unit.numel for unit in frozen) > sum(unit.numel for unit in trained) > 0
    rows = {}
    for row in engine.plan.rows:
        rows[row.array] = rows.get(row.array, 0) + row.nbytes
    numel = sum(unit.numel for unit in trained)
    assert rows["optimizer states"] == numel * (2 + 4 + 4)  # remainder and two moments
    assert rows["gradients"] == numel * 2
    assert rows["flat gradients in flight"] == 2 * max(unit.nbytes for unit in trained)
    train(engine, *range(STEPS))
    engine.synchronize()
    before = engine.statistics()
    train(engine, *range(STEPS))
    engine.synchronize()
    after = engine.statistics()
    assert after.nvme_write_bytes - before.nvme_write_bytes == numel * (2 + 10) * (after.steps - before.steps)


def test_a_wrapper_that_would_be_trained_is_refused_by_name(open_engine: Open, nvme_path: Any) -> None:
    model = quantised("torchao-like")
    with torch.no_grad():
        model.blocks[1].up.base.weight.requires_grad_(True)
    with pytest.raises(
        ConfigError,
        match=r"blocks\.1\.up\.base\.weight: training a Int8Tensor, which wraps other tensors.*requires_grad_\(False\)",
    ):
        open_engine(model, make_config(("cpu", "cpu"), nvme_path))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn])
def test_codes_are_packed_and_counters_and_masks_are_not(dtype: torch.dtype) -> None:
    assert is_packed(torch.zeros(4, 4).to(dtype))
    assert not is_packed(torch.tensor(3))
    assert not is_packed(torch.zeros(4, dtype=torch.bool))
    assert not is_packed(torch.arange(4))


def test_the_statistics_of_a_batch_norm_take_the_compute_dtype_still(open_engine: Open, nvme_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    engine = open_engine(model, make_config(("cpu", "cpu"), nvme_path))
    assert engine.module[1].running_mean.dtype is torch.bfloat16
