"""The CUDA kernels give the bits of the CPU kernels. Skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offload.kernels import kernels
from offload.kernels.kernels import Formula, Moments, Segment

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

NUMELS = [0, 1, 17, 4095, 4096, 4097, 100_003]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CUDA = torch.device("cuda")


def values(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All magnitudes, with inf, NaN, zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-20, 20, (numel,), generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    out[: min(numel, len(special))] = special[:numel]
    return out.to(dtype)


def same(cpu: list[Tensor], cuda: list[Tensor]) -> bool:
    pairs = zip(cpu, cuda, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs)


def on(device: torch.device, tensors: list[Tensor | None]) -> list[Any]:
    return [None if tensor is None else tensor.clone().to(device) for tensor in tensors]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("mode", ["split", "fp32", "rounded", "fp16 with fp32 master"])
@pytest.mark.parametrize("unaligned", [False, True])
def test_adamw_gives_the_bits_of_the_cpu(numel: int, grad_dtype: torch.dtype, mode: str, unaligned: bool) -> None:
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    master = {"split": torch.zeros(numel, dtype=torch.int16), "fp32": None, "rounded": None}.get(mode, weight.clone())
    dtypes = {"split": torch.bfloat16, "rounded": torch.bfloat16, "fp32": torch.float32}
    weight = weight.to(dtypes.get(mode, torch.float16))
    moments = [torch.randn(numel).mul_(1e-2), torch.rand(numel).mul_(1e-3)]
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(grad_dtype)
    cut = numel // 3
    common = {"bias2_sqrt": 0.3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    segments = [
        Segment(begin=0, end=cut, step_size=1e-2, decay=0.99, l2=0.0, **common),
        Segment(begin=cut, end=2 * cut, skip=True, step_size=1e-2, decay=1.0, l2=0.0, **common),
        Segment(begin=2 * cut, end=numel, step_size=3e-3, decay=1.0, l2=0.1, **common),
    ]
    results = []
    for device in (torch.device("cpu"), CUDA):
        w, m, a, s, g = on(device, [weight, master, *moments, grad])
        if unaligned:  # one of them is enough
            g = torch.cat([g[:1], g])[1:] if numel else g
        kernels.adamw(w, m, Moments(a, s), g, segments, grad_scale=0.7)
        results.append([t for t in (w, m, a, s) if t is not None])
    assert same(*results)


@pytest.mark.parametrize("numel", [0, 1, 4097, 100_003])
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("mode", ["split", "fp32", "fp16 with fp32 master"])
def test_other_optimizers_give_the_bits_of_the_cpu(numel: int, grad_dtype: torch.dtype, mode: str) -> None:
    cut = numel // 3
    common = {"beta1": 0.9, "beta2": 0.3, "eps": 1e-8}
    segments = [
        Segment(0, cut, step_size=1e-2, decay=0.99, first=True, **common),
        Segment(cut, 2 * cut, skip=True),
        Segment(2 * cut, numel, step_size=3e-3, l2=0.1, gain=0.4, nesterov=True, **common),
    ]
    present = [(Formula.LION, 1), (Formula.SGD, 0), (Formula.SGD, 1), (Formula.ADAGRAD, 1)]
    present += [(Formula.RMSPROP, bits) for bits in (1, 3, 5, 7)]
    for formula, bits in present:
        start = values(numel, 1)
        master = {"split": torch.zeros(numel, dtype=torch.int16), "fp32": None}.get(mode, start.clone())
        weight = start.to({"split": torch.bfloat16, "fp32": torch.float32}.get(mode, torch.float16))
        states = [values(numel, 3 + k).abs() if bits >> k & 1 else None for k in range(len(formula.states))]
        grad = values(numel, 2, grad_dtype)
        results = []
        for device in (torch.device("cpu"), CUDA):
            w, m, g, *held = on(device, [weight, master, grad, *states])
            kernels.update(formula, w, m, held, g, segments, grad_scale=0.7)
            results.append([t for t in (w, m, *held) if t is not None])
        assert same(*results), formula


@pytest.mark.parametrize("numel", [0, 256, 4096 + 512, 100 * 4096])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.uint8])
def test_narrow_moments_have_the_bits_of_the_cpu(numel: int, kind: torch.dtype) -> None:
    cut = numel // 3 // 16 * 16
    segments = [
        Segment(0, cut, step_size=1e-2, bias2_sqrt=0.3, decay=0.99),
        Segment(cut, 2 * cut, skip=True),
        Segment(2 * cut, numel, step_size=3e-3, bias2_sqrt=0.2, l2=0.1),
    ]
    results = []
    for device in (torch.device("cpu"), CUDA):
        weight, *given = on(device, [values(numel, seed).mul_(1e-3) for seed in (1, 2, 3)])
        blocks = numel // 256 if kind == torch.uint8 else 0
        scales = [torch.zeros(blocks, device=device) if kind == torch.uint8 else None for _ in range(2)]
        codes = [torch.zeros(numel, dtype=kind, device=device) for _ in range(2)]
        for step in range(2):
            moments = Moments(*codes, *scales, origin=8192, step=step)
            kernels.adamw(weight, None, moments, given[step], segments)
        loaded = kernels.moments_load(moments)
        kernels.moments_store(moments, *loaded)
        results.append([weight, *loaded, *codes, *(scale for scale in scales if scale is not None)])
    assert same(*results)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_cast_gives_the_bits_of_the_cpu(numel: int, source: torch.dtype, target: torch.dtype) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        (given,) = on(device, [values(numel, 3, source)])
        out = torch.empty(numel, dtype=target, device=device)
        kernels.cast(out, given, scale=0.3)
        results.append([out])
    assert same(*results)


@pytest.mark.parametrize("numel", NUMELS)
def test_split_and_join_give_the_bits_of_the_cpu(numel: int) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        (given,) = on(device, [values(numel, 4)])
        weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
        remainder = torch.empty(numel, dtype=torch.int16, device=device)
        joined = torch.empty(numel, device=device)
        kernels.split(weight, remainder, given)
        kernels.join(joined, weight, remainder)
        results.append([weight, remainder, joined])
    assert same(*results)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulation_and_block_sums_give_the_bits_of_the_cpu(numel: int, dtype: torch.dtype) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        total, given = on(device, [values(numel, 5), values(numel, 6, dtype)])
        kernels.accumulate(total, given)
        results.append([total, kernels.block_sumsq(given)])
    assert same(*results)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_a_cast_that_sums_gives_the_bits_of_the_cpu(numel: int, source: torch.dtype, target: torch.dtype) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        (given,) = on(device, [values(numel, 7, source)])
        out = torch.empty(numel, dtype=target, device=device)
        sums = kernels.cast_sumsq(out, given, scale=0.3)
        results.append([out, sums])
    assert same(*results)


def test_a_cast_that_sums_works_where_the_values_are() -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        (given,) = on(device, [values(100_003, 8, torch.bfloat16)])
        results.append([kernels.cast_sumsq(given, given, scale=0.3), given])
    assert same(*results)


@pytest.mark.parametrize("numel", [*NUMELS, 3_000_001])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("how", ["same", "wide", "add"])
def test_a_sum_over_ranks_gives_the_bits_of_the_cpu(numel: int, source: torch.dtype, how: str) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        sources = on(device, [values(numel, 10 + rank, source) for rank in range(3)])
        (stored,) = on(device, [values(numel, 9, source if how == "same" else torch.float32)])
        sums = kernels.reduce_ranks(stored, sources, scale=0.3, add=how == "add")
        results.append([stored, sums])
    assert same(*results)
