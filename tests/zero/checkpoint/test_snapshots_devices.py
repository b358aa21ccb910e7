"""Snapshots beside a device whose copies lag, and beside other things that rewrite planes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, unequal, values
from lagging import lagging_device
from models import build
from probe import snapshots_of, snapshots_were_void
from snapshot_runs import as_a_kill_would_leave_it, committed, config_of

Open = Callable[..., Any]


@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme"), ("none", "nvme")], ids="-".join)
@pytest.mark.parametrize("threshold", [0, 200])
def test_a_device_whose_copies_lag_goes_on_bit_for_bit(
    open_engine: Open,
    tmp_path: Path,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    threshold: int,
) -> None:
    """The paths are those of a GPU: what is on the device passes through memory on its way to its slots."""
    keys = {"stage3_param_persistence_threshold": threshold}
    (tmp_path / "plain").mkdir()
    plain = train(open_engine(build("gpt"), config_of(tmp_path / "plain", 9, pair, zero=keys)), *range(6))
    expected = values(plain)
    with lagging_device(monkeypatch):
        first = train(open_engine(build("gpt"), config_of(nvme_path, 2, pair, zero=keys)), *range(5))
        later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
        second = open_engine(build("gpt", seed=9), config_of(later, 2, pair, zero=keys))
        assert second.load_snapshot() == 4
        found = values(train(second, 4, 5))
        assert not snapshots_were_void(first), "nothing was void"
        first.close()
        second.close()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_checkpoint_that_is_loaded_is_in_no_snapshot_of_before(
    open_engine: Open, tmp_path: Path, nvme_path: Path
) -> None:
    first = train(open_engine(build("gpt"), config_of(nvme_path)), 0, 1)
    first.save_checkpoint(str(tmp_path / "saved"))
    train(first, 2)
    assert committed(nvme_path)["step"] == 2  # type: ignore[index]
    first.load_checkpoint(str(tmp_path / "saved"))
    train(first, 2)
    assert snapshots_of(first).committed_step in (2, 3)
    train(first, 3)
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    second = open_engine(build("gpt", seed=9), config_of(later))
    step = second.load_snapshot()
    assert step in (3, 4)
    train(second, *range(step, 4))
    assert unequal(first, second) == []


@pytest.mark.parametrize("behind", [False, True])
def test_checkpoints_and_snapshots_do_not_disturb_each_other(
    open_engine: Open, tmp_path: Path, nvme_path: Path, behind: bool
) -> None:
    config = {**config_of(nvme_path), "checkpoint": {"async_save": behind}}
    engine = open_engine(build("gpt"), config)
    for index in range(4):
        train(engine, index)
        engine.save_checkpoint(str(tmp_path / "saved"))
    engine.wait_for_checkpoint()
    assert committed(nvme_path)["step"] == 3  # type: ignore[index]
    later = as_a_kill_would_leave_it(nvme_path, tmp_path / "later")
    expected = values(engine)
    second = open_engine(build("gpt", seed=9), config_of(later))
    assert second.load_snapshot() == 3
    train(second, 3)
    assert all(torch.equal(value, expected[key]) for key, value in values(second).items())
    second.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(value, expected[key]) for key, value in values(second).items())
