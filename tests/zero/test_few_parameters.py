"""Many parameters share a sub-group: to read or replace one moves the blocks that hold it, and changes no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config, seeded
from probe import keeper_of, storage_of
from torch import Tensor, nn

from zero import utils

Open = Callable[..., Any]
COUNT, NUMEL, BLOCK = 48, 2048, 4096
BYTES = 2 + 2 * 4
"""Of an element in a record: the remainder of a bf16 weight, and two moments."""


class Many(nn.Module):
    """Parameters of which two fill a block; one of the last three lies across two blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [NUMEL] * (COUNT - 3) + [1000, 2000, 3000]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(numel)) for numel in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * x[: len(weight)]).mean() for weight in self.weights]).square().sum()


def opened(open_engine: Open, nvme_path: Path, tier: str = "nvme", **more: Any) -> Any:
    """An engine of these parameters after a step; all are persistent, and a dozen share a sub-group."""
    states = more.pop("states", {})
    keys = {"stage3_param_persistence_threshold": BLOCK, "offload_optimizer": states}
    with seeded(0):
        engine = open_engine(Many(), make_config((tier, tier), nvme_path, zero=keys, **more))
    assert all(group.end - group.begin >= 6 * BLOCK for group in engine.plan.sub_groups)
    step(engine, 0)
    engine.synchronize()
    return engine


def step(engine: Any, seed: int) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)))
    engine.step()


def moved_by(engine: Any, action: Callable[[], object]) -> tuple[int, int]:
    """(bytes read, bytes written) on the disk."""
    traffic = storage_of(engine).disk.traffic
    read_bytes, write_bytes = traffic.read_bytes, traffic.write_bytes
    action()
    return traffic.read_bytes - read_bytes, traffic.write_bytes - write_bytes


def each(read: Callable[[nn.Parameter], object]) -> Callable[[Any], object]:
    return lambda engine: [read(parameter) for parameter in engine.module.weights]


READS: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda engine: engine.optimizer.state_dict(),
    "full_master": lambda engine: [engine.full_master(f"weights.{i}") for i in range(COUNT)],
    "a whole value": each(utils.safe_get_full_fp32_param),
    "a whole state": each(lambda parameter: utils.safe_get_full_optimizer_state(parameter, "exp_avg")),
    "an own part": each(lambda parameter: utils.safe_get_local_optimizer_state(parameter, "exp_avg")),
    "taken back": lambda engine: keeper_of(engine).unwrap_model(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_each_parameter_reads_each_block_about_as_often_as_it_holds_parameters(
    open_engine: Open, nvme_path: Path, read: str
) -> None:
    engine = opened(open_engine, nvme_path)
    reads, _ = moved_by(engine, lambda: READS[read](engine))
    assert 0 < reads <= (COUNT + 3) * BLOCK * BYTES  # some lie across two blocks


def test_replacing_each_parameter_writes_each_block_about_as_often(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, nvme_path)
    saved = engine.optimizer.state_dict()
    bound = (COUNT + 3) * BLOCK * BYTES
    reads, writes = moved_by(engine, lambda: engine.optimizer.load_state_dict(saved))
    assert 0 < writes <= 2 * bound and reads <= 2 * bound  # each of two moments
    weights = list(engine.module.weights)
    reads, writes = moved_by(engine, lambda: [utils.safe_set_full_fp32_param(w, torch.ones(w.shape)) for w in weights])
    assert 0 < writes <= 2 * bound and reads <= 2 * bound  # the weight's master, and its remainder


def values(engine: Any) -> dict[str, Tensor]:
    found = {}
    for i in range(COUNT):
        name = f"weights.{i}"
        found.update({f"{name} {key}": value for key, value in engine.full_state(name).items() if key != "step"})
        found[name] = engine.full_master(name)
    return found


def edited(engine: Any) -> dict[str, Tensor]:
    """Values after some of one parameter in the middle, and of the last, were replaced, and a step."""
    for index in (7, COUNT - 1):
        weight = engine.module.weights[index]
        ones = torch.linspace(0.5, 1, weight.numel())
        utils.safe_set_full_optimizer_state(weight, ones, "exp_avg_sq")
        utils.safe_set_local_optimizer_state(weight, -ones, "exp_avg")
        utils.safe_set_full_fp32_param(weight, 3 * ones)
    step(engine, 1)
    return values(engine)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_what_is_replaced_in_a_part_of_a_record_is_replaced_as_in_memory(
    open_engine: Open, nvme_path: Path, precision: str, state_dtype: str
) -> None:
    more: dict[str, Any] = {"bf16": precision == "bf16", "states": {"state_dtype": state_dtype}}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "loss_scale": 8.0}
    ours, theirs = (edited(opened(open_engine, nvme_path, tier, **more)) for tier in ("nvme", "cpu"))
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def test_with_snapshots_a_part_is_read_alone_and_written_with_the_rest(open_engine: Open, nvme_path: Path) -> None:
    ours, theirs = (
        opened(open_engine, nvme_path, states={"snapshot": {"every": 1}} if kept else {}) for kept in (True, False)
    )
    reads, _ = moved_by(ours, lambda: ours.full_state("weights.7"))
    assert 0 < reads <= 2 * BLOCK * BYTES
    found, wanted = edited(ours), edited(theirs)
    assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []
