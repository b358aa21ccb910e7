"""What changes state runs to its end before a signal's handler, and a long wait does not."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from offload.system.interrupts import DEFER_SECONDS_MAX, atomic, deferring_interrupts


class Rang(KeyboardInterrupt):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def ring(request: pytest.FixtureRequest) -> Iterator[Any]:
    number = request.param

    def rang(number: int, frame: Any) -> None:
        raise Rang

    before = signal.signal(number, rang)
    yield lambda: signal.raise_signal(number)
    assert signal.getsignal(number) is rang
    signal.signal(number, before)


def test_the_handler_runs_when_the_outermost_context_ends(ring: Any) -> None:
    done = []
    with pytest.raises(Rang), deferring_interrupts:
        with deferring_interrupts:
            ring()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    with pytest.raises(Rang):
        ring()


def test_a_function_that_is_whole_ends_and_what_it_raised_is_told_as_the_cause(ring: Any) -> None:
    @atomic
    def change() -> None:
        ring()
        raise ValueError("on purpose")

    with pytest.raises(Rang) as caught:
        change()
    assert isinstance(caught.value.__context__, ValueError)


def test_every_signal_is_delivered(ring: Any) -> None:
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(Rang), deferring_interrupts:
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            ring()
            assert seen == []
        assert set(seen) == {signal.SIGUSR2}
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_is_installed_inside_stays(ring: Any) -> None:
    def mine(number: int, frame: Any) -> None:
        raise AssertionError("never")

    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        with deferring_interrupts:
            signal.signal(signal.SIGHUP, mine)
        assert signal.getsignal(signal.SIGHUP) is mine
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_long_wait_lets_it_through_and_a_short_one_does_not(ring: Any) -> None:
    with pytest.raises(Rang), deferring_interrupts:
        ring()
        deferring_interrupts.deliver_overdue()
        time.sleep(DEFER_SECONDS_MAX)
        deferring_interrupts.deliver_overdue()
        raise AssertionError("the wait went on")


def test_on_other_threads_nothing_is_kept(ring: Any) -> None:
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with deferring_interrupts:
                deferring_interrupts.deliver_overdue()
        except BaseException as error:
            failed.append(error)

    with pytest.raises(Rang), deferring_interrupts:
        ring()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert failed == []
