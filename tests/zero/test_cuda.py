"""Training on a GPU: where bytes live never changes a number there either. Skipped where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("on_the_gpu")

DEVICES = ("none", "cpu", "nvme")


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


def test_fp16_scales_and_bits_agree_between_tiers_also_where_steps_overflow(
    open_engine: Callable[..., Any], nvme_path: Path
) -> None:
    block = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}
    reference = trained(open_engine, make_config(("none", "none"), nvme_path, bf16=False, fp16=block), steps=14)
    for pair in (("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme")):
        found = trained(open_engine, make_config(pair, nvme_path, bf16=False, fp16=block), steps=14)
        assert [name for name in reference if not torch.equal(reference[name], found[name])] == [], pair


def test_a_closed_engine_leaves_no_device_memory(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    trained(open_engine, make_config(("nvme", "nvme"), nvme_path), steps=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trained(open_engine, make_config(("nvme", "nvme"), nvme_path), steps=2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_a_stream_of_the_users_changes_no_bit(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    for pair in itertools.product(DEVICES, DEVICES):
        config = make_config(pair, nvme_path, clipping=1.0)
        reference = trained(open_engine, config)
        with torch.cuda.stream(torch.cuda.Stream()):
            found = trained(open_engine, config)
        assert [name for name in reference if not torch.equal(reference[name], found[name])] == [], pair


def test_a_host_that_runs_ahead_of_the_device_changes_no_bit(open_engine: Callable[..., Any], nvme_path: Path) -> None:
    """The device sleeps before each forward and each backward: what forgets to wait for it comes too early."""
    for pair in itertools.product(DEVICES, DEVICES):
        config = make_config(pair, nvme_path, clipping=1.0)
        reference = trained(open_engine, config, steps=4)
        engine = open_engine(build("gpt"), config)
        for index in range(4):
            torch.cuda._sleep(50_000_000)
            loss = engine(tokens(index).cuda())
            torch.cuda._sleep(50_000_000)
            engine.backward(loss)
            engine.step()
        found = dict(engine.named_full_parameters())
        engine.close()
        assert [name for name in reference if not torch.equal(reference[name], found[name])] == [], pair


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_states_that_stay_on_the_device_are_updated_there_to_the_same_bits(
    open_engine: Callable[..., Any], nvme_path: Path, ratio: float
) -> None:
    for param, states in itertools.product(DEVICES, ("cpu", "nvme")):
        plain = make_config((param, states), nvme_path, clipping=1.0)
        keys = {"offload_optimizer": {"ratio": ratio}}
        shared = make_config((param, states), nvme_path, clipping=1.0, zero=keys)
        reference, found = trained(open_engine, plain), trained(open_engine, shared)
        assert [name for name in reference if not torch.equal(reference[name], found[name])] == [], (param, states)


@pytest.mark.parametrize("pair", list(itertools.product(DEVICES, DEVICES)), ids="-".join)
def test_no_memory_of_the_device_is_allocated_after_the_third_step(
    open_engine: Callable[..., Any], nvme_path: Path, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, clipping=1.0))
    counts = []
    for index in range(8):
        engine.backward(engine(tokens(index).cuda()))
        engine.step()
        torch.cuda.synchronize()
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert counts[3:] == counts[2:3] * 5
