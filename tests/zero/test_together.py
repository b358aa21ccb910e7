"""Work of all ranks fails on all of them, each with the error that it can do something about."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import ConfigError, DamagedError, StateError, StorageError
from zero.assembly.snapshots import SnapshotConsensus
from zero.store.all_ranks import AllRanks, DeferringFailures


class Room:
    """Ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._told = Barrier(ranks, timeout=30), [b""] * ranks

    def exchange(self, rank: int) -> Any:
        def agree(what: str, payload: bytes) -> list[bytes]:
            self._told[rank] = payload
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        return SimpleNamespace(
            placement=SimpleNamespace(rank=rank, is_single_rank=len(self._told) == 1), all_gather_bytes=agree
        )


def outcomes(*works: Callable[[Any], Any]) -> list[Any]:
    """What each rank's work returned or raised, given its exchange."""
    room = Room(len(works))

    def run(rank: int) -> Any:
        try:
            return works[rank](room.exchange(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, range(len(works))))


def does(kind: type[AllRanks], error: Exception | None) -> Callable[[Any], Any]:
    """Work of `kind` that raises `error`, or returns "done"."""

    def act() -> str:
        if error is not None:
            raise error
        return "done"

    return lambda exchange: kind(exchange).run_on_all("the work", act)


FULL = StorageError("write", errno=28, path="/disk/file", offset=4096, free_bytes=0)


def test_what_all_can_do_is_done_and_the_first_alone_has_its_result() -> None:
    assert outcomes(*[does(AllRanks, None)] * 3) == ["done"] * 3
    assert outcomes(*[lambda exchange: AllRanks(exchange).run_on_first("the work", lambda: 7)] * 3) == [7, None, None]
    assert (
        outcomes(*[lambda exchange: AllRanks(exchange).all_gather_results("words", b"mine")] * 2)
        == [[b"mine", b"mine"]] * 2
    )


@pytest.mark.parametrize(
    ("kind", "error", "elsewhere"),
    [
        (AllRanks, FULL, StateError),
        (AllRanks, ConfigError("wrong"), StateError),
        (AllRanks, DamagedError("torn"), DamagedError),
        (AllRanks, ZeroDivisionError("of a user's object"), StateError),
        (DeferringFailures, FULL, StorageError),
        (DeferringFailures, ConfigError("wrong"), StateError),
        (SnapshotConsensus, FULL, ConfigError),
    ],
)
def test_a_failure_is_raised_as_it_is_and_named_elsewhere(
    kind: type[AllRanks], error: Exception, elsewhere: type[Exception]
) -> None:
    first, second, third = outcomes(does(kind, None), does(kind, error), does(kind, None))
    assert second is error
    for other in (first, third):
        assert type(other) is elsewhere
        assert "the work ends with an error of another rank: rank 1 has failed (" in str(other)
        assert str(error) in str(other)


def test_the_place_of_a_storage_error_is_known_on_all_ranks() -> None:
    other, _ = outcomes(does(DeferringFailures, None), does(DeferringFailures, FULL))
    assert (other.errno, other.path, other.offset) == (28, "/disk/file", 4096)


def test_a_rank_with_an_error_of_its_own_hears_of_damage_too() -> None:
    damaged, other = outcomes(does(AllRanks, DamagedError("torn")), does(AllRanks, FULL))
    assert str(damaged) == "torn" and type(other) is DamagedError and other.__cause__ is FULL


def test_what_a_piece_could_not_do_is_said_by_the_next_exchange_and_at_once_where_nobody_waits() -> None:
    reached: list[int] = []

    def work(exchange: Any) -> None:
        relay = DeferringFailures(exchange)
        with relay.deferring_failure():
            if exchange.placement.rank == 0:
                raise FULL
        reached.append(exchange.placement.rank)
        assert relay.has_failed == (exchange.placement.rank == 0)
        relay.all_gather_results("the work")

    mine, other = outcomes(work, work)
    assert mine is FULL and isinstance(other, StorageError) and sorted(reached) == [0, 1]
    reached.clear()
    assert outcomes(work) == [FULL] and reached == []
