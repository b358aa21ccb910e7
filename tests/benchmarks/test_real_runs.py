"""Published shapes at a tenth of their depth train inside the memory that the whole models are held to."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.cgroup import MemoryCgroup
from benchmarks.common import run_child
from benchmarks.published import KINDS, RUNS, WIDTHS


@pytest.fixture
def disk() -> Path:
    """A folder with room: a tenth of the largest run takes 20 GB."""
    folder = Path(os.environ.get("ZERO_BENCHMARK_PATH", "/var/tmp"))
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < 25 * 10**9:
        pytest.skip(f"{folder} has less than 25 GB free; name another by ZERO_BENCHMARK_PATH")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_published_shape_trains_inside_its_memory(name: str, disk: Path) -> None:
    run = RUNS[name].tenth()
    spec = run.spec(disk, warmup=1, steps=1)
    try:
        group = MemoryCgroup(int(run.limit_gib * 2**30), "zero-infinity-test").__enter__()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        figures = run_child(["-m", "benchmarks.shaped_worker", json.dumps(spec)], prefix=group.prefix)
        assert group.kills == 0
    finally:
        group.__exit__(None, None, None)
    assert all(math.isfinite(loss) for loss in figures["losses"])
    assert figures["plan_bytes"]["host"] + figures["plan_bytes"]["device"] < run.limit_gib * 2**30
    if run.tuning == "lora":
        assert figures["whole_experts"] == 0, "experts are fetched by rows"
        assert figures["nvme_write_bytes"] < 0.02 * figures["plan_bytes"]["nvme"], "the base is never written"


def test_a_run_names_a_shape_that_is_there_and_a_tenth_of_it_is_as_wide() -> None:
    for run in (*RUNS.values(), *KINDS.values()):
        whole, tenth = run.model, run.tenth().model
        assert {**whole, "num_hidden_layers": 0} == {**tenth, "num_hidden_layers": 0}
        assert 2 <= tenth["num_hidden_layers"] <= whole["num_hidden_layers"] // 8 or whole["num_hidden_layers"] < 20
        for width, layers in WIDTHS.values():
            small: dict[str, Any] = run.of_width(width, layers).model
            assert small["hidden_size"] == width and small["num_hidden_layers"] == layers
