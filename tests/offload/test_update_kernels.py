"""The kernels of optimizers beside Adam: torch's bits on every instruction set, whatever is stored how.

torch's square roots on the host may be MKL's, which are not IEEE's; here torch takes them in fp64 and rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_roots import as_torch_fuses, with_exact_roots
from torch import Tensor

import native
from offload.errors import NativeError
from offload.kernels import kernel_backend, kernels, masters
from offload.kernels.kernels import Formula, Segment
from zero.ops.lion import Lion

try:
    LIB = native.load().lib
except native.NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

ISAS = [isa for isa in ("scalar", "avx2", "avx512") if LIB.zn_cpu_isa_select(isa.encode()) == 0]
LIB.zn_cpu_isa_select(b"best")
NUMELS = (1, 15, 64, 65, 4097, 2 * 65536 + 4101)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STEPS = 3
Case = tuple[Formula, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "Lion": (
        *(Formula.LION, Lion, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}),
        {"step_size": 0.02, "beta1": 0.8, "beta2": 0.95, "decay": 1 - 0.02 * 0.1},
    ),
    "SGD": (Formula.SGD, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}, {"step_size": 0.05, "l2": 0.1}),
    "SGD with momentum": (
        *(Formula.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
        {"step_size": 0.05, "beta1": 0.9, "gain": 1 - 0.3},
    ),
    "nesterov": (
        *(Formula.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.7, "nesterov": True, "weight_decay": 0.01}),
        {"step_size": 0.05, "beta1": 0.7, "gain": 1.0, "nesterov": True, "l2": 0.01},
    ),
    "Adagrad": (
        *(Formula.ADAGRAD, torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
        {"step_size": 0.05, "l2": 0.1, "eps": 1e-10},
    ),
    "RMSprop": (Formula.RMSPROP, torch.optim.RMSprop, {"lr": 0.01}, {"step_size": 0.01, "beta2": 0.99}),
    "RMSprop with momentum": (
        *(Formula.RMSPROP, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.6, "weight_decay": 0.1}),
        {"step_size": 0.01, "beta2": 0.99, "beta1": 0.6, "l2": 0.1},
    ),
    "centered": (
        *(Formula.RMSPROP, torch.optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-3}),
        {"step_size": 0.01, "beta2": 0.99, "eps": 1e-3},
    ),
    "centered with momentum, from the end": (
        *(Formula.RMSPROP, torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.6, "alpha": 0.3}),
        {"step_size": 0.01, "beta2": 0.3, "beta1": 0.6},
    ),
}
"""Name -> formula, torch's class, its options, and the same as a segment's numbers."""


@pytest.fixture(autouse=True)
def best_isa_afterwards() -> Iterator[None]:
    yield
    assert LIB.zn_cpu_isa_select(b"best") == 0


def samples(numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 4, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 10.0**exponents


def states_of(name: str, numel: int) -> list[Tensor | None]:
    formula, _, options, _ = CASES[name]
    needed = {"momentum_buffer": options.get("momentum", 0) > 0, "grad_avg": options.get("centered", False)}
    return [torch.zeros(numel) if needed.get(state, True) else None for state in formula.states]


def by_torch(name: str, weight: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Master and states after a step with each gradient."""
    formula, kind, options, _ = CASES[name]
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = kind([parameter], **options, **({} if kind is Lion else {"foreach": False}))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        with with_exact_roots():
            optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), [state.get(each) for each in formula.states]


def by_kernel(
    name: str, dtype: torch.dtype, master: Tensor, given: list[Tensor], scale: float, threads: int = 1
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Weight, master and states."""
    formula, _, _, numbers = CASES[name]
    weight = torch.empty(master.numel(), dtype=dtype)
    kept = masters.remainder_dtype(dtype)
    remainder = None if kept is None else torch.empty(master.numel(), dtype=kept)
    masters.split(weight, remainder, master)
    states = states_of(name, master.numel())
    for step, gradient in enumerate(given):
        segments = [Segment(0, master.numel(), **numbers, first=step == 0)]
        kernels.update(formula, weight, remainder, states, gradient, segments, grad_scale=scale, threads=threads)
    whole = torch.empty(master.numel())
    masters.join(whole, weight, remainder)
    return weight, whole, states


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


@as_torch_fuses
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_every_isa_has_the_bits_of_torch_however_weights_and_gradients_are_stored(name: str, isa: str) -> None:
    assert LIB.zn_cpu_isa_select(isa.encode()) == 0
    for numel, (dtype, grad_dtype), scale in zip(
        itertools.cycle(NUMELS), itertools.product(FLOATS, FLOATS), itertools.cycle((1.0, 0.37)), strict=False
    ):
        given = [samples(numel, 10 + step).to(grad_dtype) for step in range(STEPS)]
        start = samples(numel, 1)
        factor = torch.tensor(scale)
        expected, states = by_torch(name, start, [gradient.float() * factor for gradient in given])
        weight, master, held = by_kernel(name, dtype, start, given, scale)
        assert same([master, *held], [expected, *states]), (numel, dtype, grad_dtype)
        rounded = torch.empty(numel, dtype=dtype)
        masters.split(rounded, None if dtype == torch.float32 else torch.empty(numel, dtype=STORED[dtype]), expected)
        assert torch.equal(weight, rounded)


STORED = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [2, 7])
def test_an_update_does_not_depend_on_the_number_of_threads(name: str, threads: int) -> None:
    numel = 5 * 65536 + 4097
    start, given = samples(numel, 1), [samples(numel, 2).bfloat16()]
    one, several = (by_kernel(name, torch.bfloat16, start, given, 0.5, count) for count in (1, threads))
    assert same([*one[:2], *one[2]], [*several[:2], *several[2]])


@pytest.mark.parametrize("isa", ISAS)
def test_a_multiply_add_is_rounded_once(isa: str) -> None:
    # The sum lies 2^-54 below the middle of two fp32 numbers: rounded to fp64 first, it would be the middle.
    assert LIB.zn_cpu_isa_select(isa.encode()) == 0
    for sign in (1.0, -1.0):
        weight = torch.full((65,), sign * (1 + 2**-23))
        gradient = torch.full((65,), -sign * (1 - 2**-15))
        segment = Segment(0, 65, step_size=2**-24 * (1 + 2**-15))
        kernels.update(Formula.SGD, weight, None, [None], gradient, [segment])
        assert (weight == sign * (1 + 2**-23)).all()


@as_torch_fuses
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_values_that_are_not_finite_are_torchs(name: str, isa: str) -> None:
    assert LIB.zn_cpu_isa_select(isa.encode()) == 0
    inf, nan = float("inf"), float("nan")
    start = torch.tensor([1.0, -0.0, 0.0, inf, -inf, nan, 1e-45, 3.4e38, -3.4e38, 1.0, 1.0, 1.0])
    gradients = [torch.tensor([0.0, -0.0, -0.0, 1.0, 1.0, 1.0, 1e-45, -3.4e38, 3.4e38, inf, -inf, nan])] * 2
    expected, states = by_torch(name, start, gradients)
    _, master, held = by_kernel(name, torch.float32, start, gradients, 1.0)
    for ours, theirs in zip([master, *held], [expected, *states], strict=True):
        if ours is not None and theirs is not None:
            finite = ~theirs.isnan()
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours[finite].view(torch.int32), theirs[finite].view(torch.int32))
            assert (ours[~finite].view(torch.int32) == 0x7FC00000).all()


def test_elements_outside_every_segment_and_skipped_ones_are_left_alone() -> None:
    numel = 1000
    for name, (formula, _, _, numbers) in CASES.items():
        weight, gradient = samples(numel, 1), samples(numel, 2)
        states = [None if state is None else state.fill_(0.5) for state in states_of(name, numel)]
        before = [each.clone() for each in (weight, *states) if each is not None]
        segments = [Segment(10, 300, **numbers), Segment(300, 600, skip=True, **numbers), Segment(700, 999, **numbers)]
        kernels.update(formula, weight, None, states, gradient, segments)
        for old, new in zip(before, [each for each in (weight, *states) if each is not None], strict=True):
            changed = (old != new).nonzero().view(-1)
            inside = ((changed >= 10) & (changed < 300)) | ((changed >= 700) & (changed < 999))
            assert inside.all() and len(changed) > 500


def test_what_does_not_fit_is_refused() -> None:
    f32, segments = torch.zeros(8), [Segment(0, 8)]
    for formula in Formula:
        wrong = [f32.double()] + [None] * (len(formula.states) - 1)
        with pytest.raises(TypeError, match=formula.states[0]):
            kernels.update(formula, f32, None, wrong, f32, segments)
        with pytest.raises(ValueError, match="outside"):
            kernels.update(formula, f32, None, [None] * len(formula.states), f32, [Segment(0, 9)])
    for formula in (Formula.LION, Formula.ADAGRAD, Formula.RMSPROP):
        with pytest.raises(NativeError, match="update"):
            kernels.update(formula, f32, None, [None] * len(formula.states), f32, segments)
    with pytest.raises(TypeError, match="master"):
        kernels.update(Formula.SGD, f32.bfloat16(), None, [None], f32, segments)


def test_without_the_library_an_update_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_NATIVE", "0")
    kernel_backend._load.cache_clear()  # it warns once a process
    with pytest.warns(RuntimeWarning, match="no native kernels"):
        assert not kernels.native_on(torch.device("cpu"))
    with pytest.raises(NativeError, match="there is no native library for cpu"):
        kernels.update(Formula.SGD, torch.zeros(4), None, [None], torch.zeros(4), [Segment(0, 4)])
