"""`deepspeed.utils.OnDevice`: modules built on a device and in a dtype."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class OnDevice:
    """Context: tensors are constructed on a device, floating ones in a dtype.

    Args:
        dtype: of floating tensors that name none.
        device: such as "meta".
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        """Start."""
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As before."""
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)
