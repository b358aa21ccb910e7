"""Square roots of torch as IEEE has them: on the host MKL's are off by one unit in the last place now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

_sqrt = Tensor.sqrt


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
