"""Makes torch's rounding comparable with the kernels': exact IEEE square roots (MKL's are sometimes off by one unit in
the last place), and a skip on CPUs where torch does not fuse multiplications and additions."""

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
    """The root is taken in fp64, which has more than twice the digits, so rounding to fp32 gives the exact result."""
    return _sqrt(tensor.to(torch.float64)).to(tensor.dtype)


@contextmanager
def with_exact_roots() -> Iterator[None]:
    """Inside, `tensor.sqrt()` and `tensor.sqrt_()` compute `rooted`."""
    with (
        mock.patch.object(Tensor, "sqrt", rooted),
        mock.patch.object(Tensor, "sqrt_", lambda tensor: tensor.copy_(rooted(tensor))),
    ):
        yield


def has_kernel(name: str) -> bool:
    """True if a kernel updates for the class of this name. Skips the test if torch cannot round as the kernel does."""
    found = name in WITH_KERNELS and kernels.native_on(torch.device("cpu"))
    if found and not TORCH_FUSES:
        pytest.skip(WHY)
    return found


def as_its_kernel(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, steps of an optimizer round as the kernel of its class, if any. Skips the test if torch cannot do so."""
    name = type(optimizer).__name__
    return with_exact_roots() if has_kernel(name) and name in WITH_ROOTS else nullcontext()
