"""The torch-facing kernels: the fallback equals the native code, and both follow torch's optimizers."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import native
from offload.kernels import kernel_backend, kernels, kernels_fallback
from offload.kernels.kernels import Moments, Segment
from offload.kernels.square_sums import nonfinite_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 7, 15, 16, 17, 1023, 4095, 4096, 4097, 12289]
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 1.1754944e-38, 3.4e38, -3.4028235e38, 65520.0]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


def needs_native() -> None:
    try:
        native.load()
    except native.NativeUnavailable as error:
        pytest.skip(f"nothing to compare the fallback with: {error}")


def in_torch(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> Any:
    """What `action` returns when the native library is turned off."""
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setenv("ZERO_NATIVE", "0")
        assert kernels.isa() == "torch"
        return action()


def samples(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of all magnitudes with every special one among them, once there is room."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 36, (numel,), generator=generator).double()
    values = (torch.randn(numel, generator=generator).double() * 10.0**exponents).float()
    where = torch.randperm(numel, generator=generator)[: len(SPECIALS)]
    values[where] = torch.tensor(SPECIALS)[: len(where)]
    return values.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS.get(tensor.dtype, tensor.dtype))


def same_bits(ours: list[Tensor], reference: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, reference, strict=True))


def hyper(**changes: Any) -> dict[str, Any]:
    return {"step_size": 3e-3, "bias2_sqrt": 0.3, "decay": 1 - 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | changes


def cut_segments(numel: int) -> list[Segment]:
    """AdamW, a skipped run, Adam with L2, and a gap in front of the last that belongs to nobody."""
    third, half, late = numel // 3, numel // 2, numel - numel // 5
    return [
        Segment(0, third, **hyper()),
        Segment(third, half, skip=True, **hyper()),
        Segment(late, numel, **hyper(decay=1.0, l2=0.01)),
    ]


MASTERS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


def state(numel: int, weight_dtype: torch.dtype, master_dtype: torch.dtype | None) -> list[Tensor]:
    """Weight, both moments and the master, if there is one; the weight belongs to the master."""
    full = samples(numel, 1)
    weight, moments = full.to(weight_dtype), [samples(numel, 3), samples(numel, 4)]
    if master_dtype is None:
        return [weight, *moments]
    if master_dtype == torch.float32:
        return [weight, *moments, full]
    remainder = torch.empty(numel, dtype=torch.int16)
    kernels.split(weight, remainder, full)
    return [weight, *moments, remainder]


def update(tensors: list[Tensor], grad: Tensor, segments: list[Segment], **options: Any) -> None:
    weight, exp_avg, exp_avg_sq, *master = tensors
    kernels.adamw(weight, master[0] if master else None, Moments(exp_avg, exp_avg_sq), grad, segments, **options)


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize(("weight_dtype", "master_dtype"), MASTERS)
def test_the_torch_update_has_the_bits_of_the_native_one(
    monkeypatch: pytest.MonkeyPatch,
    weight_dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    grad_dtype: torch.dtype,
) -> None:
    needs_native()

    def three_steps(numel: int, threads: int) -> list[Tensor]:
        tensors = state(numel, weight_dtype, master_dtype)
        for step in range(3):
            grad = samples(numel, 10 + step, grad_dtype)
            update(tensors, grad, cut_segments(numel), grad_scale=0.37, threads=threads)
        return tensors

    for numel in NUMELS:
        reference = three_steps(numel, 1)
        assert same_bits(in_torch(monkeypatch, lambda: three_steps(numel, 1)), reference), numel  # noqa: B023
        assert same_bits(three_steps(numel, 2), reference), numel


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("weight_dtype", "master_dtype"), MASTERS)
def test_an_update_leaves_skipped_and_foreign_elements_alone(
    monkeypatch: pytest.MonkeyPatch, weight_dtype: torch.dtype, master_dtype: torch.dtype | None, disabled: bool
) -> None:
    numel = 1000
    tensors = state(numel, weight_dtype, master_dtype)
    before = [tensor.clone() for tensor in tensors]
    segments = [Segment(100, 200, **hyper()), Segment(200, 300, skip=True, **hyper()), Segment(900, 950, **hyper())]
    touched = torch.zeros(numel, dtype=torch.bool)
    touched[100:200] = touched[900:950] = True
    grad = torch.ones(numel)
    if disabled:
        in_torch(monkeypatch, lambda: update(tensors, grad, segments))
    else:
        update(tensors, grad, segments)
    for now, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(now)[~touched], bits(old)[~touched])
    assert not torch.equal(bits(tensors[1])[touched], bits(before[1])[touched])


def test_cutting_a_segment_changes_no_bit() -> None:
    numel = 10_000
    whole, cut = state(numel, torch.bfloat16, torch.int16), state(numel, torch.bfloat16, torch.int16)
    grad = samples(numel, 5, torch.bfloat16)
    update(whole, grad, [Segment(0, numel, **hyper())])
    edges = [0, 1, 4096, 4100, 8191, numel]
    update(cut, grad, [Segment(a, b, **hyper()) for a, b in itertools.pairwise(edges)])
    assert same_bits(cut, whole)


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_fp32_update_follows_torch_within_two_ulp_a_step(decoupled: bool) -> None:
    numel, steps, lr, betas, eps, weight_decay = 5000, 20, 1e-3, (0.9, 0.95), 1e-8, 0.1
    generator = torch.Generator().manual_seed(0)
    weight = 0.6 + torch.rand(numel, generator=generator)  # far from 0 for all steps, so that an ulp keeps its size
    reference = torch.nn.Parameter(weight.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    for t in range(1, steps + 1):
        grad = torch.randn(numel, generator=generator)
        reference.grad = grad.clone()
        optimizer.step()
        segment = Segment(
            *(0, numel),
            step_size=lr / (1 - betas[0] ** t),
            bias2_sqrt=math.sqrt(1 - betas[1] ** t),
            decay=1 - lr * weight_decay if decoupled else 1.0,
            l2=0.0 if decoupled else weight_decay,
            **{"beta1": betas[0], "beta2": betas[1], "eps": eps},
        )
        kernels.adamw(weight, None, Moments(exp_avg, exp_avg_sq), grad, [segment])
    ulps = (bits(weight) - bits(reference.detach())).abs().max().item()
    assert ulps <= 2 * steps


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("in_dtype", FLOATS)
def test_torch_casts_have_the_bits_of_the_native_ones(
    monkeypatch: pytest.MonkeyPatch, in_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    needs_native()

    def cast(numel: int, scale: float) -> list[Tensor]:
        out, src = torch.zeros(numel, dtype=out_dtype), samples(numel, 6, in_dtype)
        kernels.cast(out, src, scale, threads=2)
        return [out]

    for numel in NUMELS:
        for scale in (1.0, 0.3):
            assert same_bits(cast(numel, scale), in_torch(monkeypatch, lambda: cast(numel, scale)))  # noqa: B023


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cast_without_scale_is_the_conversion_of_torch(dtype: torch.dtype) -> None:
    src = samples(12289, 7)
    out = torch.empty_like(src, dtype=dtype)
    kernels.cast(out, src)
    expected = src.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(bits(out)[~out.isnan()], bits(expected)[~out.isnan()])
    kernels.cast(out, out, 2.0)
    assert torch.equal(out.nan_to_num(1.5), (expected.float() * 2).to(dtype).nan_to_num(1.5))


@pytest.mark.parametrize("in_dtype", FLOATS)
@pytest.mark.parametrize("first_dtype", [None, *FLOATS])
def test_accumulation_adds_in_fp32_with_the_same_bits_in_torch(
    monkeypatch: pytest.MonkeyPatch, first_dtype: torch.dtype | None, in_dtype: torch.dtype
) -> None:
    needs_native()

    def accumulate(numel: int) -> list[Tensor]:
        total, src = samples(numel, 8), samples(numel, 9, in_dtype)
        first = None if first_dtype is None else samples(numel, 10, first_dtype)
        expected = (total if first is None else first.float()) + src.float()
        kernels.accumulate(total, src, first)
        assert torch.equal(total.isnan(), expected.isnan())
        assert torch.equal(total[~total.isnan()], expected[~total.isnan()])
        return [total]

    for numel in NUMELS:
        assert same_bits(accumulate(numel), in_torch(monkeypatch, lambda: accumulate(numel)))  # noqa: B023


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf])
def test_a_weight_that_was_set_since_its_split_has_a_master_that_is_a_number(
    monkeypatch: pytest.MonkeyPatch, disabled: bool, value: float
) -> None:
    """Whatever the remainder is: it is then an older weight's."""
    remainder = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    weight = torch.full_like(remainder, value, dtype=torch.bfloat16)

    def joined() -> list[Tensor]:
        out = torch.empty(len(weight))
        kernels.join(out, weight, remainder)
        return [out]

    (master,) = in_torch(monkeypatch, joined) if disabled else joined()
    assert not master.isnan().any()
    if math.isfinite(value):
        assert ((master - value).abs() <= max(abs(value) / 128, 2.0**-133)).all()  # 0: remainders are subnormals
    else:
        assert (master[1 << 15 :] == value).all()  # negative remainders lie below the largest finite value's end


@pytest.mark.parametrize("disabled", [False, True])
def test_split_then_join_gives_the_same_floats_back(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    def round_trip(src: Tensor) -> list[Tensor]:
        weight, remainder = torch.empty_like(src, dtype=torch.bfloat16), torch.empty_like(src, dtype=torch.int16)
        joined = torch.empty_like(src)
        kernels.split(weight, remainder, src)
        kernels.join(joined, weight, remainder)
        return [weight, remainder, joined]

    generator = torch.Generator().manual_seed(5)
    patterns = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32)
    src = patterns.view(torch.float32)
    results = in_torch(monkeypatch, lambda: round_trip(src)) if disabled else round_trip(src)
    expected = torch.where(src.isnan(), torch.tensor(math.nan), src)
    assert torch.equal(bits(results[2]), bits(expected))
    assert same_bits(results, round_trip(src))


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_block_sums_have_the_bits_of_the_native_ones(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    needs_native()
    for numel in NUMELS:
        for src in (samples(numel, 11, dtype), torch.randn(numel).to(dtype)):
            ours = kernels.block_sumsq(src)
            assert ours.shape == (-(-numel // 4096), 2)
            assert torch.equal(in_torch(monkeypatch, lambda: kernels.block_sumsq(src)), ours)  # noqa: B023
            assert int(nonfinite_of(ours).sum()) == int((~src.isfinite()).sum())


@pytest.mark.parametrize("nbytes", [0, 1, 9, 4095, 4096, 12289, 24575, 24576, 24585, 1_000_003])
def test_the_checksum_is_the_same_in_numpy_and_can_be_continued(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    head, tail = data[: nbytes // 3], data[nbytes // 3 :]
    whole = kernels.crc32c(data)
    assert kernels.crc32c(tail, kernels.crc32c(head)) == whole
    assert in_torch(monkeypatch, lambda: kernels.crc32c(data)) == whole
    assert in_torch(monkeypatch, lambda: kernels.crc32c(tail, kernels.crc32c(head))) == whole


def test_the_checksum_of_the_catalogue_comes_out_for_any_dtype() -> None:
    text = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    assert kernels.crc32c(text) == 0xE3069283
    floats = torch.randn(1000)
    assert kernels.crc32c(floats) == kernels.crc32c(floats.view(torch.uint8))


class LargestNewTensor(TorchDispatchMode):
    """Remembers the largest tensor that an operation allocated."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def test_the_fallback_needs_scratch_of_one_tile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 5 * kernels_fallback.TILE_NUMEL + 3
    tensors = state(numel, torch.bfloat16, torch.int16)
    grad, full = torch.randn(numel), torch.randn(numel)

    def everything() -> int:
        with LargestNewTensor([*tensors, grad, full]) as watch:
            update(tensors, grad, cut_segments(numel))
            kernels.cast(full, grad, 0.5)
            kernels.accumulate(full, tensors[0])
            kernels.split(tensors[0], tensors[3], full)
            kernels.join(full, tensors[0], tensors[3])
            kernels.block_sumsq(full)
        return watch.nbytes

    assert 0 < in_torch(monkeypatch, everything) <= 8 * kernels_fallback.TILE_NUMEL


def test_the_fallback_warns_once_and_names_cause_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_NATIVE", "0")
    kernel_backend._load.cache_clear()
    with pytest.warns(RuntimeWarning, match="disabled by ZERO_NATIVE=0.*takes about") as caught:
        for _ in range(3):
            kernels.cast(torch.empty(4), torch.ones(4))
    assert len(caught) == 1


def test_a_tensor_of_the_wrong_kind_is_refused_by_name() -> None:
    f32, bf16 = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    segments, both = [Segment(0, 8)], Moments(f32, f32)
    with pytest.raises(TypeError, match=r"exp_avg_sq: expected 8 elements of torch.float32 on cpu, got 7"):
        kernels.adamw(f32, None, Moments(f32, f32[:7]), f32, segments)
    with pytest.raises(TypeError, match=r"master: torch.bfloat16 weights need one of torch.int16 or torch.float32"):
        kernels.update(kernels.Formula.SGD, bf16, None, [None], f32, segments)
    with pytest.raises(TypeError, match=r"master: torch.float16 weights need one of torch.float32"):
        kernels.adamw(bf16.half(), None, both, f32, segments)
    with pytest.raises(TypeError, match=r"master: must be None"):
        kernels.adamw(f32, f32, both, f32, segments)
    with pytest.raises(TypeError, match=r"master: expected 8 elements of torch.float32 on cpu, got 8 of torch.int16"):
        kernels.adamw(bf16.half(), bf16.view(torch.int16), both, f32, segments)
    with pytest.raises(TypeError, match=r"grad: .* got 8 of torch.float64"):
        kernels.adamw(f32, None, both, f32.double(), segments)
    with pytest.raises(TypeError, match=r"src: must be flat and contiguous, got shape \(4,\), strides \(2,\)"):
        kernels.cast(torch.empty(4), f32[::2])
    with pytest.raises(TypeError, match=r"total: .* on meta"):
        kernels.accumulate(torch.empty(8, device="cpu"), torch.empty(8, device="meta"))
    with pytest.raises(TypeError, match=r"remainder: expected 8 elements of torch.int16"):
        kernels.split(bf16, torch.ones(8, dtype=torch.int32), f32)


@pytest.mark.parametrize(("begin", "end"), [(-1, 4), (5, 4), (0, 9)])
def test_a_segment_outside_the_tensors_is_refused(begin: int, end: int) -> None:
    weight, exp_avg, exp_avg_sq, grad = (torch.ones(8) for _ in range(4))
    with pytest.raises(ValueError, match=r"outside tensors of 8 elements"):
        kernels.adamw(weight, None, Moments(exp_avg, exp_avg_sq), grad, [Segment(begin, end, step_size=1.0)])
    assert torch.equal(weight, torch.ones(8))
