"""A save that continues while ranks train: every rank learns how it has ended, also when one of them dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from harness import train
from ranks import RankError, RankPool
from ranks_model import motley
from ranks_runs import Place, Run, engine_config, on_batch, quiet

from offload.errors import StorageError, ZeroInfinityError
from offload.files.durable import Files

Pool = Callable[[int], RankPool]
PLACE = Place(2, "none", "cpu")
RANKS = 3


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """One of its own: a rank of it dies."""
    made = RankPool(RANKS)
    yield made
    made.close()


class DyingFiles(Files):
    """The process dies before this file gets its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def perform(self, operation: Any, path: Path, action: Callable[[], Any], new: Path | None = None) -> Any:
        if new is not None and new.name == self._name:
            self.end(path)
        return super().perform(operation, path, action, new)

    def end(self, path: Path) -> NoReturn:
        while len(list(path.parent.parent.parent.glob("training-*"))) < RANKS:
            time.sleep(0.01)  # else others could still be in the collectives with which the save begins
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class FailingFiles(DyingFiles):
    def end(self, path: Path) -> NoReturn:
        raise StorageError("write", errno=5, path=str(path), offset=0, free_bytes=None)


def save_beside(folder: str, files: list[Files]) -> list[str]:
    """What this rank learns of a save of each, and of one more."""
    import zero

    quiet()
    config = engine_config(Run(ranks=RANKS), PLACE, folder)
    engine = zero.initialize(model=motley(), config={**config, "checkpoint": {"async_save": True}})[0]
    said = []
    for index, made in enumerate((files[dist.get_rank()], Files())):
        train(engine, index, loss_of=on_batch)
        engine.files = made
        engine.save_checkpoint(f"{folder}/saved", str(index))
        Path(folder, f"training-{dist.get_rank()}").touch()
        try:
            engine.wait_for_checkpoint()
            said.append("saved")
        except ZeroInfinityError as error:
            said.append(f"{type(error).__name__}: {error}")
            if "died" in str(error):
                return said  # and close nothing: that would wait for the dead
    engine.close()
    return said


def metadata_file() -> str:
    from zero.checkpoint.dcp_format import METADATA_FILE

    return METADATA_FILE


@pytest.mark.broad
@pytest.mark.parametrize("victim", range(RANKS))
def test_all_learn_of_a_rank_that_dies_before_it_has_written_its_part(
    pool: RankPool, tmp_path: Path, victim: int
) -> None:
    """Nobody waits for the patience to end: it is longer than the time that the ranks have."""
    from zero.checkpoint.rank_data_file import list_file_name

    files = [DyingFiles(list_file_name(rank)) if rank == victim else Files() for rank in range(RANKS)]
    answers = pool.run(save_beside, str(tmp_path), files, timeout_seconds=110.0, errors="return")
    assert isinstance(answers[victim], RankError)
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(answers[rank], list), repr(answers[rank])
        assert len(answers[rank]) == 1 and f"rank {victim} its process has died" in answers[rank][0], answers[rank]


@pytest.mark.parametrize("rank", range(RANKS))
def test_all_learn_of_a_save_that_one_rank_could_not_complete(rank_pool: Pool, tmp_path: Path, rank: int) -> None:
    """Its part, or on the first rank the checkpoint; the next save is as if there had been none."""
    from zero.checkpoint.rank_data_file import list_file_name

    name = list_file_name(rank) if rank else metadata_file()
    files = [FailingFiles(name) if rank == each else Files() for each in range(RANKS)]
    answers = rank_pool(RANKS).run(save_beside, str(tmp_path), files)
    for each, (first, second) in enumerate(answers):
        assert first.startswith("StorageError" if each == rank else "StateError"), first
        assert second == "saved"
    assert sorted(path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()) == ["1"]
