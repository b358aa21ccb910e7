"""Where torch's own rounding can be compared with: square roots as IEEE has them (MKL's are off by one unit in the last
place now and then), and CPUs on which torch fuses multiplications and additions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

_sqrt = Tensor.sqrt
as_torch_fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this torch rounds products and sums apart, kernels once: rules stay tiled, and there is nothing to compare",
)


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
