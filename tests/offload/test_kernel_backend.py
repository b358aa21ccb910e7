"""A native library is used where it runs, which only a call shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native import NativeUnavailable
from offload.errors import NativeError
from offload.kernels.kernel_backend import Backend, backend_for, try_out


class Refusing(Backend):
    def call(self, name: str, *arguments: Any, threads: int) -> None:
        raise NativeError(f"{name}: status 209 (no kernel image is available for execution on the device)")


class Idle(Backend):
    def call(self, name: str, *arguments: Any, threads: int) -> None:
        """Nothing is computed."""


@pytest.mark.parametrize(
    ("kind", "said"), [(Refusing, "no kernel image"), (Idle, "a test of the kernels failed: expected 2, got 1.0")]
)
def test_a_library_that_does_not_compute_is_not_available(kind: type[Backend], said: str) -> None:
    backend = backend_for(torch.device("cpu"))
    if backend is None:
        pytest.skip("no native library here")
    try_out(backend)
    with pytest.raises(NativeUnavailable, match=said):
        try_out(kind(backend.native, backend.device))
