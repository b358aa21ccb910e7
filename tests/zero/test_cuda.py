"""Training on a GPU: where bytes live never changes a number there either. Skipped where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

DEVICES = ("none", "cpu", "nvme")


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ZERO_DEVICE", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(open_engine: Callable[..., Any], config: dict[str, Any], steps: int = 10) -> dict[str, torch.Tensor]:
    engine = open_engine(build("gpt"), config)
    for index in range(steps):
        engine.backward(engine(tokens(index).cuda()))
        engine.step()
    statistics = engine.statistics()
    assert statistics.gathered_bytes > 0 and min(statistics.releases_by_unit.values()) > 0
    found = dict(engine.named_full_parameters())
    engine.close()
    return found


def test_every_pair_of_tiers_trains_to_the_same_bits(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    reference = trained(open_engine, make_config(("none", "none"), nvme_path, clipping=1.0))
    for pair in itertools.product(DEVICES, DEVICES):
        found = trained(open_engine, make_config(pair, nvme_path, clipping=1.0))
        assert [name for name in reference if not torch.equal(reference[name], found[name])] == [], pair


def test_accumulation_in_fp32_agrees_between_tiers(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    reference = trained(open_engine, make_config(("none", "none"), nvme_path, accumulation=4), steps=12)
    found = trained(open_engine, make_config(("nvme", "nvme"), nvme_path, accumulation=4), steps=12)
    assert [name for name in reference if not torch.equal(reference[name], found[name])] == []


def test_a_closed_engine_leaves_no_device_memory(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    trained(open_engine, make_config(("nvme", "nvme"), nvme_path), steps=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trained(open_engine, make_config(("nvme", "nvme"), nvme_path), steps=2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
