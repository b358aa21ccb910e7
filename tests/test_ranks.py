"""The tests' own ranks: results in order, errors with their ranks, nothing left behind, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool

Pool = Callable[[int], RankPool]


def summed(scale: float, own: float) -> torch.Tensor:
    total = torch.tensor([scale * own])
    dist.all_reduce(total)
    return total


def raising(culprit: int) -> int:
    if dist.get_rank() == culprit:
        raise ValueError("this one")
    return dist.get_rank()


def hanging(culprit: int) -> None:
    if dist.get_rank() == culprit:
        print("about to hang")
        time.sleep(1000)


def dying(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)


def alive(pid: int) -> bool:
    """True while the process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_rank_order(rank_pool: Pool) -> None:
    results = rank_pool(2).run(summed, 2.0, per_rank=[(1.0,), (10.0,)])
    assert [result.item() for result in results] == [22.0, 22.0]


def test_an_error_names_its_rank_and_the_pool_goes_on(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    before = pool.run(os.getpid)
    with pytest.raises(RankError, match=r"ranks \[1\] of 2") as failure:
        pool.run(raising, 1)
    assert "ValueError: this one" in str(failure.value)
    kept, error = pool.run(raising, 1, errors="return")
    assert kept == 0 and isinstance(error, ValueError)
    assert pool.run(os.getpid) == before


def test_a_rank_that_hangs_is_shown_and_replaced(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    before = pool.run(os.getpid)
    with pytest.raises(RankError, match=r"(?s)ranks \[0\].*no answer in time.*about to hang.*in hanging"):
        pool.run(hanging, 0, timeout_seconds=1.0)
    assert not any(alive(pid) for pid in before)
    assert rank_pool(2).run(summed, 1.0, per_rank=[(1.0,), (2.0,)])[0].item() == 3.0


def test_a_rank_that_dies_is_told(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    with pytest.raises(RankError, match="ended with -9"):
        pool.run(dying, 1)
    assert len(set(pool.run(os.getpid))) == 2
    kept, lost = pool.run(dying, 1, errors="return")
    assert kept is None and isinstance(lost, RankError) and "ended with -9" in str(lost)


SCRIPT = """
import os, sys, time
sys.path[:0] = {paths!r}
from ranks import RankPool
if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(os.getpid), flush=True)
    time.sleep(1000)
"""


def test_ranks_die_with_whoever_started_them(tmp_path: Path) -> None:
    script = tmp_path / "starts_ranks.py"
    script.write_text(SCRIPT.format(paths=[str(Path(__file__).parent), str(Path(__file__).parent.parent)]))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            pids = [int(word) for word in job.stdout.readline().split()]
        finally:
            job.kill()
    assert len(pids) == 2
    end = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
