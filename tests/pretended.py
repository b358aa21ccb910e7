"""A pretended accelerator: torch reports one in the three places where the product asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


def pretend_accelerator(monkeypatch: pytest.MonkeyPatch, name: str = "cuda", **functions: Any) -> None:
    """Torch sees one device of this kind, and no environment variable forbids its use.

    Args:
        functions: further functions of torch's module for this kind; its current device is number 0 by default.
    """
    ordinary = {"current_device": lambda: 0, "device_count": lambda: 1, "is_initialized": lambda: True}
    module, module_of = SimpleNamespace(**{**ordinary, **functions}), torch.get_device_module

    def pretended(device: Any = None) -> Any:
        return module if getattr(device, "type", device) == name else module_of(device)

    for variable in ("ZERO_DEVICE", "DS_ACCELERATOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: SimpleNamespace(type=name))
    monkeypatch.setattr(torch, "get_device_module", pretended)
