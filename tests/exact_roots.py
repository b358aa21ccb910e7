"""Where torch's own rounding can be compared with: square roots as IEEE has them (MKL's are off by one unit in the last
place now and then), and CPUs on which torch fuses multiplications and additions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from offload.kernels import kernels

_sqrt = Tensor.sqrt
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
WHY = "this torch rounds products and sums apart, kernels once: there is nothing to compare"
as_torch_fuses = pytest.mark.skipif(not TORCH_FUSES, reason=WHY)
WITH_ROOTS = ("Adagrad", "RMSprop", "DeepSpeedCPUAdagrad")
WITH_KERNELS = (*WITH_ROOTS, "SGD", "Lion", "FusedLion", "DeepSpeedCPULion")


def rooted(tensor: Tensor) -> Tensor:
    """Taken in fp64, which has more than twice the digits: rounding to fp32 then is as if done once."""
    return _sqrt(tensor.to(torch.float64)).to(tensor.dtype)


@contextmanager
def with_exact_roots() -> Iterator[None]:
    """`tensor.sqrt()` and `tensor.sqrt_()` do as `rooted`."""
    with (
        mock.patch.object(Tensor, "sqrt", rooted),
        mock.patch.object(Tensor, "sqrt_", lambda tensor: tensor.copy_(rooted(tensor))),
    ):
        yield


def has_kernel(name: str) -> bool:
    """Does a kernel update for the class of this name? Skips the test if torch cannot round as it does."""
    found = name in WITH_KERNELS and kernels.native_on(torch.device("cpu"))
    if found and not TORCH_FUSES:
        pytest.skip(WHY)
    return found


def as_its_kernel(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Steps of an optimizer inside round as the kernel of its class, if there is one; skips the test if they cannot."""
    name = type(optimizer).__name__
    return with_exact_roots() if has_kernel(name) and name in WITH_ROOTS else nullcontext()
