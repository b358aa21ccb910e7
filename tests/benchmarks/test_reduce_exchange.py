"""The question about adding up gradients: all its ways do the same work, and it runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import reduce_exchange
from benchmarks.common import RivalMissing


def test_every_way_leaves_the_same_mean_and_block_sums() -> None:
    if dist.is_initialized():  # an engine that was made before has joined a group of one
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rank = reduce_exchange.Rank(3 * 8192)
        found = {}
        for name in reduce_exchange.CANDIDATES:
            rank.stored.fill_(-1)
            try:
                seconds, cpu_seconds = rank.run(name)
            except RivalMissing:
                continue
            assert seconds > 0 and cpu_seconds > 0
            found[name] = [rank.stored.clone(), rank.sums.clone()]
        assert {"ours", "gloo all-to-all", "bound"} <= set(found)
        for tensors in found.values():
            assert all(torch.equal(ours, other) for ours, other in zip(found["bound"], tensors, strict=True))
        assert torch.equal(found["ours"][0], rank.flat.float())
        rank.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_answer_the_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    monkeypatch.setattr("sys.argv", ["reduce_exchange", "--json", str(file), "--rounds", "1", "--mib", "1"])
    reduce_exchange.main()
    answer = json.loads(file.read_text())
    assert [mark["what"] for mark in answer["marks"]] or answer["missing"]
    assert answer["figures"]["1 MiB, 2 ranks: CPU seconds of ours"] > 0
