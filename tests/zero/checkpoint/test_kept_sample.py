"""A checkpoint that an earlier version has written loads for ever, at every stage and on every tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import generators_kept
from kept_checkpoint import CLIENT, EXPECTED, FOLDER, TAG, holds, open_kept, small
from ranks import RankPool
from reference import differences

load_file = pytest.importorskip("safetensors.torch").load_file
SMALL = ("global_steps", "micro_steps", "lr", "scheduled", "drawn")


def expected() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what the model and its optimizer held, the rest)."""
    told = load_file(EXPECTED)
    return told, {key: told.pop(key) for key in SMALL}


def loaded(folder: str, stage: int, params: str, states: str, bf16: bool) -> Any:
    """What an engine holds that has loaded it, and the client state."""
    with generators_kept():
        engine, scheduler = open_kept(2, folder, (params, states), stage, bf16=bf16)
        with engine:
            path, client = engine.load_checkpoint(FOLDER)
            if path != str(FOLDER / TAG):
                raise AssertionError(path)
            return holds(engine), small(engine, scheduler), client


@pytest.mark.parametrize(
    ("stage", "params", "states", "bf16"),
    [(3, "nvme", "nvme", True), (3, "cpu", "none", False), (2, "none", "cpu", True), (0, "none", "none", True)],
)
def test_it_loads_with_one_rank(nvme_path: Path, stage: int, params: str, states: str, bf16: bool) -> None:
    values, rest = expected()
    held, others, client = loaded(str(nvme_path), stage, params, states, bf16)
    if not bf16:  # what is not trained is computed in fp32 then
        held = {key: value.to(values[key].dtype) for key, value in held.items()}
    assert differences(held, values) == []
    assert differences(others, rest) == []
    assert client == CLIENT


def test_it_loads_with_the_ranks_that_have_written_it(rank_pool: Callable[[int], RankPool], nvme_path: Path) -> None:
    values, rest = expected()
    for held, _, client in (told := rank_pool(2).run(loaded, str(nvme_path), 3, "nvme", "cpu", True)):
        assert differences(held, values) == []
        assert client == CLIENT
    assert differences(told[0][1], rest) == []


def test_plain_torch_reads_it() -> None:
    values, _ = expected()
    mine = {name: torch.empty_like(value) for name, value in values.items()}
    dcp.load(mine, storage_reader=dcp.FileSystemReader(FOLDER / TAG))
    assert differences(mine, values) == []


def test_no_path_of_the_machine_that_wrote_it_is_in_it() -> None:
    for path in (path for path in (FOLDER / TAG).rglob("*") if path.is_file()):
        data = path.read_bytes()
        for part in (b"/home", b"/tmp", b"/root", b"/work", b"/usr", b"\\Users"):
            assert part not in data, path
