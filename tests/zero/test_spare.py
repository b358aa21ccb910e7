"""Memory of used gradients is lent to updates, and is the gradients' again when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness import masters, reference_of, train, unequal
from hypothesis import given, settings
from hypothesis import strategies as st
from lagging import lagging_device
from models import build, make_config, tokens
from on_tiers import equal
from probe import gradients_of, is_lent, spare_of
from recovery import NVME, Open, once_more

from offload.errors import StorageError
from offload.io.aio import AioFault
from offload.memory.pool import ExtentAllocator

SIZE = 24
SPANS = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair)))
ACTIONS = st.one_of(
    st.tuples(st.just("give"), SPANS),
    st.tuples(st.just("withdraw"), SPANS),
    st.tuples(st.just("lend"), st.integers(1, 8)),
    st.tuples(st.just("take back"), st.integers(0, 10)),
)


@given(st.lists(ACTIONS, max_size=40))
@settings(deadline=None)
def test_only_what_is_given_and_not_lent_is_lent_and_it_is_the_first_run_long_enough(actions: list[Any]) -> None:
    """Against one flag per address."""
    ranges, offered, lent = ExtentAllocator(align_bytes=1), [False] * SIZE, dict[int, int]()
    for action, argument in actions:
        free = [offered[i] and not any(b <= i < b + n for b, n in lent.items()) for i in range(SIZE)]
        if action in ("give", "withdraw"):
            (ranges.offer if action == "give" else ranges.withdraw)(*argument)
            offered[slice(*argument)] = [action == "give"] * (argument[1] - argument[0])
            reaches = any(b < argument[1] and argument[0] < b + n for b, n in lent.items())
            assert ranges.is_allocated(*argument) == reaches
        elif action == "lend":
            first = next((i for i in range(SIZE - argument + 1) if all(free[i : i + argument])), None)
            assert ranges.allocate(argument, lowest=True) == first
            if first is not None:
                lent[first] = argument
        elif lent:
            begin = sorted(lent)[argument % len(lent)]
            del lent[begin]
            ranges.free(begin)


class Watch:
    """Counts what is lent, and notes a unit whose gradient begins while its memory is."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.spare, self.lent, self.withdrawn, self.trespassers = spare_of(engine), 0, 0, []
        self._try_lease, self._reclaim = self.spare.try_lease, gradients_of(engine).reclaim_memory
        self.spare.try_lease, gradients_of(engine).reclaim_memory = self.try_lease, self.reclaim

    def try_lease(self, nbytes: int) -> Any:
        block = self._try_lease(nbytes)
        self.lent += block is not None
        return block

    def reclaim(self, unit: Any) -> None:
        self.withdrawn += self.spare.is_offered(unit.index)
        self._reclaim(unit)
        if self.spare.is_offered(unit.index) or is_lent(self._engine, unit):
            self.trespassers.append(unit.name)


KEYS = {"sub_group_size": 4096, "stage3_param_persistence_threshold": 0}


@pytest.fixture(params=["the host", "a device that lags"])
def engine(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """What computes; gradients are in memory of the host."""
    with nullcontext() if request.param == "the host" else lagging_device(monkeypatch):
        yield open_engine(build("gpt"), make_config(NVME, nvme_path, zero=KEYS))


def slow_writes(delay_seconds: float = 0.01, **more: Any) -> AioFault:
    return AioFault(delay_rate=1.0, delay_seconds=delay_seconds, ops=("write",), **more)


def test_results_wait_in_memory_that_gradients_get_back_before_they_arrive(engine: Any) -> None:
    reference, watch = reference_of(), Watch(engine)
    engine.inject(slow_writes())
    for index in range(4):
        train(engine, index)
        train(reference, index)
    assert watch.lent > 3, "on a disk that writes slowly there is always something to lend for"
    assert watch.withdrawn > 0
    assert watch.trespassers == []
    assert unequal(engine, reference) == []


def test_gradients_that_nobody_lends_for_stay_where_they_are(engine: Any) -> None:
    """A second micro-step adds to what the first has put there."""
    reference, watch = reference_of(), Watch(engine)
    engine.inject(slow_writes())
    for index in range(3):
        for trainer in (engine, reference):
            trainer.backward(trainer(tokens(index)))
            trainer.backward(trainer(tokens(index + 10)))
            trainer.step()
    assert watch.lent > 3
    assert watch.trespassers == []
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_result_that_was_not_written_outlasts_the_gradient_that_takes_its_memory(engine: Any, count: int) -> None:
    """Writes that wait since forward fail inside the backward that needs the memory they wait in."""
    reference, watch = reference_of(), Watch(engine)
    engine.inject(slow_writes())
    train(engine, 0)
    train(reference, 0, 1, 2)
    loss = engine(tokens(1))
    engine.inject(slow_writes(fail_rate=1.0, count_max=count))
    try:
        engine.backward(loss)
    except StorageError:  # a gradient had to wait for an update, which met the disk
        once_more(engine.zero_grad, attempts=60)  # either may meet what is left of the faults: a slow machine decides
        once_more(lambda: engine.backward(engine(tokens(1))), attempts=60)
    engine.inject(None)
    once_more(engine.step)
    once_more(lambda: train(engine, 2))
    assert watch.lent > 0
    assert watch.withdrawn > 0
    assert unequal(engine, reference) == []


def test_closing_does_not_wait_for_a_backward(engine: Any, nothing_left: None) -> None:
    engine.inject(slow_writes())
    train(engine, 0, 1)
    engine.close()


def test_loaded_gradients_lie_in_no_memory_that_updates_use(engine: Any, tmp_path: Path) -> None:
    train(engine, 0, 1)
    engine.backward(engine(tokens(2)))
    engine.save_checkpoint(tmp_path)
    engine.inject(slow_writes())
    engine.step()
    engine.synchronize()
    expected = masters(engine)
    train(engine, 3)
    engine.synchronize()
    spare, gradients = spare_of(engine), gradients_of(engine)
    units = [state.unit for state in gradients.states()]
    assert any(spare.is_offered(unit.index) for unit in units), "else nothing is tested"
    engine.load_checkpoint(tmp_path)
    assert not any(spare.is_offered(state.unit.index) for state in gradients.states() if not state.is_empty)
    engine.step()
    engine.synchronize()
    assert equal(masters(engine), expected)
