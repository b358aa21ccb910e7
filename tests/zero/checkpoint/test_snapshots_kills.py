"""Jobs that are killed, with one rank and with several, go on from the last commit as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe import put_snapshot_files
from ranks import RankPool
from snapshot_jobs import config, job, killed_after
from snapshot_runs import committed, folder

Pool = Callable[[int], RankPool]
STEPS = 30
PAIRS = [("nvme", "nvme"), ("cpu", "nvme")]


def survived(pool: RankPool, tmp_path: Path, kills: int, seed: int, *settings: Any, **more: Any) -> int:
    """Kill a job so many times, each a few steps and a random time after its start, and let it end."""
    instants, path, progress = random.Random(seed), tmp_path / "nvme", tmp_path / "progress"
    path.mkdir()
    made, every, last = config(str(path), *settings, **more), settings[0], 0
    for _ in range(kills):
        killed_after(pool, instants.randint(1, 2 + 2 * every), instants.random() * 0.05, made, STEPS, progress)
        manifest = committed(path)
        step = 0 if manifest is None else manifest["step"]
        assert step >= last, "a commit is never taken back"
        last = step
    results = pool.run(job, made, STEPS, str(progress))
    assert all(result[0] == (last or None) for result in results)
    (tmp_path / "plain").mkdir()
    plain = config(str(tmp_path / "plain"), *settings, **more)
    del plain["zero_optimization"]["offload_optimizer"]["snapshot"]
    expected = pool.run(job, plain, STEPS, str(progress))
    assert [result[1:] for result in results] == [result[1:] for result in expected]
    return last


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_job_that_is_killed_at_any_instant_gives_the_bits_of_one_that_is_not(
    rank_pool: Pool, tmp_path: Path, pair: tuple[str, str]
) -> None:
    assert survived(rank_pool(1), tmp_path, 5, 1, 1, pair, 200) >= 5


@pytest.mark.broad
@pytest.mark.parametrize(("stage", "shared"), [(1, False), (3, False), (3, True)])
def test_ranks_that_are_killed_at_any_instant_go_on_together(
    rank_pool: Pool, tmp_path: Path, stage: int, shared: bool
) -> None:
    """Whether they exchange slices by collectives, or read each other's files, where slices move from slot to slot."""
    pair = ("nvme", "nvme") if stage == 3 else ("none", "nvme")
    settings = {"stage": stage, "shared_host_memory": shared}
    assert survived(rank_pool(2), tmp_path, 3, stage, 2, pair, 200, **settings) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_kills(rank_pool: Pool, tmp_path: Path, seed: int, ranks: int) -> None:
    instants = random.Random(seed)
    settings = instants.choice([1, 2, 3]), instants.choice(PAIRS), instants.choice([0, 200])
    more = {} if ranks == 1 else {"shared_host_memory": instants.random() < 0.5}
    assert survived(rank_pool(ranks), tmp_path, 10, seed, *settings, **more) >= 10


def test_ranks_whose_number_changed_are_told(rank_pool: Pool, nvme_path: Path, tmp_path: Path) -> None:
    made = config(str(nvme_path), 1, PAIRS[0], 0)
    rank_pool(2).run(job, made, 2, str(tmp_path / "progress"))
    (error,) = rank_pool(1).run(job, made, 2, str(tmp_path / "progress"), errors="return")
    assert "was made by 2 ranks, and there are 1 now" in str(error)
    assert [result[0] for result in rank_pool(2).run(job, made, 3, str(tmp_path / "progress"))] == [2, 2]


def test_a_rank_without_its_part_is_named_on_all(rank_pool: Pool, nvme_path: Path, tmp_path: Path) -> None:
    made = config(str(nvme_path), 1, PAIRS[0], 0)
    rank_pool(2).run(job, made, 2, str(tmp_path / "progress"))
    manifest = folder(nvme_path) / "rank-1" / "manifest-0"
    manifest.rename(manifest.with_name("elsewhere"))
    errors = rank_pool(2).run(job, made, 3, str(tmp_path / "progress"), errors="return")
    assert all("rank 1 does not find its part" in str(error) for error in errors)
    manifest.with_name("elsewhere").rename(manifest)
    assert [result[0] for result in rank_pool(2).run(job, made, 3, str(tmp_path / "progress"))] == [2, 2]


def test_a_damaged_block_of_one_rank_is_told_on_all(rank_pool: Pool, nvme_path: Path, tmp_path: Path) -> None:
    made = config(str(nvme_path), 1, PAIRS[0], 0)
    rank_pool(2).run(job, made, 2, str(tmp_path / "progress"))
    swap = nvme_path / "zero-snapshots" / "default" / "rank-1" / "swap"
    data = bytearray(swap.read_bytes())
    swap.write_bytes(bytes(byte ^ 1 for byte in data))
    errors = rank_pool(2).run(job, made, 3, str(tmp_path / "progress"), errors="return")
    assert all("are damaged" in str(error) and str(swap) in str(error) for error in errors)
    swap.write_bytes(data)
    assert [result[0] for result in rank_pool(2).run(job, made, 3, str(tmp_path / "progress"))] == [2, 2]


def test_what_fails_on_one_rank_keeps_the_snapshot_before_on_all(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path
) -> None:
    made = config(str(nvme_path), 1, PAIRS[0], 0)
    told = rank_pool(2).run(fails_once, made)
    assert "ENOSPC" in told[1] and "rank 1: " in told[0] and "The previous snapshot is still valid" in told[0]
    assert committed(nvme_path)["step"] == committed(nvme_path, 1)["step"] == 4  # type: ignore[index]


def fails_once(made: dict[str, Any]) -> str:
    """Rank 1 cannot write its manifest of step 2 at first; the error of each rank."""
    import torch.distributed as dist
    from models import tokens
    from snapshot_jobs import Noisy

    import zero
    from offload.errors import StateError, StorageError
    from offload.files.durable import Files

    class Failing(Files):
        def perform(self, operation: Any, path: Any, action: Any, new: Any = None) -> Any:
            if operation == "write" and dist.get_rank() == 1:
                raise StorageError("write", errno=28, path=str(path), offset=0, free_bytes=0)
            return super().perform(operation, path, action, new)

    with zero.initialize(model=Noisy(), config=made)[0] as engine:
        for index in range(2):
            engine.backward(engine(tokens(index)))
            engine.step()
        put_snapshot_files(engine, Failing())
        engine.backward(engine(tokens(2)))
        told = ""
        try:
            engine.step()
        except (StateError, StorageError) as error:
            told = str(error)
        put_snapshot_files(engine, Files())
        engine.step()
        engine.backward(engine(tokens(3)))
        engine.step()
        return told


def test_a_rank_that_is_refused_the_folder_is_named_by_the_others(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path
) -> None:
    made = config(str(nvme_path), 1, PAIRS[0], 0)
    (nvme_path / "zero-snapshots" / "default").mkdir(parents=True)
    (nvme_path / "zero-snapshots" / "default" / "rank-1").write_text("in the way")
    errors = rank_pool(2).run(job, made, 1, str(tmp_path / "progress"), errors="return")
    assert all("rank-1: expected a folder, got a link or a file" in str(error) for error in errors)
