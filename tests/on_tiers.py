"""A tiny model on each tier: its configuration, some training, and its exact weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from models import make_config
from torch import Tensor

TIERS = {"device": ("none", "none"), "cpu": ("cpu", "cpu"), "nvme": ("nvme", "nvme")}
on_every_tier = pytest.mark.parametrize("tier", TIERS)


def config_of(tier: str, nvme_path: Path, **more: Any) -> dict[str, Any]:
    return make_config(TIERS[tier], nvme_path, **more)


def masters(engine: Any) -> dict[str, Tensor]:
    return harness.masters(engine, [name for name, p in engine.module.named_parameters() if p.requires_grad])


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
