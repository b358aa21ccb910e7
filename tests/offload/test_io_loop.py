"""The mover: jobs of one thread, whose results arrive, whose errors arrive, and which are never waited for in vain."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import offload.io.io_loop
from offload.errors import StateError, WatchdogError
from offload.io.io_loop import IoLoop
from offload.timeline import Stopwatch, external_wait, has_external_wait


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Iterator[IoLoop]:
    loop = IoLoop()
    yield loop
    monkeypatch.undo()  # the short time limits of a test's own jobs are not those of the close
    loop.close()


async def answer(value: int, turns: int = 0) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return value


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def until(event: threading.Event) -> str:
    while not event.is_set():
        await asyncio.sleep(0.001)
    return "done"


# ---- jobs --------------------------------------------------------------------------------------


def test_results_arrive_at_the_transfer_they_belong_to(mover: IoLoop) -> None:
    transfers = [mover.submit(f"job {index}", answer(index, turns=20 - index)) for index in range(20)]
    assert [transfer.result() for transfer in transfers] == list(range(20))
    assert all(transfer.done() for transfer in transfers)
    assert [transfer.result() for transfer in transfers] == list(range(20))  # as often as one likes
    assert mover.run("one more", answer(7)) == 7


@pytest.mark.parametrize("error", [ValueError("broken"), TimeoutError("slow"), OSError(5, "disk"), StateError("no")])
def test_exceptions_arrive_as_they_were_raised(mover: IoLoop, error: Exception) -> None:
    transfer = mover.submit("bad", fail(error))
    with pytest.raises(type(error)) as caught:
        transfer.result()
    assert (caught.value.args, str(caught.value)) == (error.args, str(error))
    settled = transfer.wait()
    assert type(settled) is type(error) and settled.args == error.args
    assert transfer.done()
    assert mover.run("next", answer(1)) == 1


def test_a_job_that_was_cancelled_settles_with_an_error(mover: IoLoop) -> None:
    transfer = mover.submit("cancelled", fail(asyncio.CancelledError()))
    assert transfer.wait() is not None
    assert transfer.done()


def test_settling_a_good_job_returns_no_error(mover: IoLoop) -> None:
    assert mover.submit("good", answer(1, turns=3)).wait() is None


def test_jobs_run_on_one_other_thread(mover: IoLoop) -> None:
    async def where() -> int:
        return threading.get_ident()

    threads = {mover.run("where", where()) for _ in range(5)}
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_jobs_interleave_at_their_awaits_and_nowhere_else(mover: IoLoop) -> None:
    steps: list[tuple[str, int]] = []
    gate = threading.Event()

    async def job(name: str) -> None:
        while not gate.is_set():
            await asyncio.sleep(0)
        for step in range(3):
            steps.append((name, step))
            steps.append((name, step))
            await asyncio.sleep(0)

    transfers = [mover.submit(name, job(name)) for name in ("a", "b")]
    gate.set()
    for transfer in transfers:
        transfer.result()
    assert steps[::2] == steps[1::2]  # what lies between two awaits is not torn
    names = [name for name, _ in steps[::2]]
    assert sorted(names) == ["a"] * 3 + ["b"] * 3 and names not in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)


def test_posting_does_not_wait(mover: IoLoop) -> None:
    event = threading.Event()
    transfer = mover.submit("waits", until(event))
    assert not transfer.done()
    event.set()
    assert transfer.result() == "done"


def test_jobs_may_start_jobs(mover: IoLoop) -> None:
    async def outer() -> list[int]:
        return list(await asyncio.gather(*(answer(index, index) for index in range(4))))

    assert mover.run("outer", outer()) == [0, 1, 2, 3]


@pytest.mark.parametrize("wait", ["run", "result", "settle", "close"])
def test_waiting_on_the_mover_thread_for_itself_raises(mover: IoLoop, wait: str) -> None:
    event = threading.Event()
    other = mover.submit("other", until(event))

    async def job() -> None:
        if wait == "run":
            mover.run("inner", answer(1))
        elif wait == "settle":
            error = other.wait()
            assert error is not None
            raise error
        else:
            (other.result if wait == "result" else mover.close)()

    with pytest.raises(StateError, match="cannot wait for itself"):
        mover.run("outer", job())
    event.set()
    assert other.result() == "done"
    mover.close()
    assert not mover._thread.is_alive()


# ---- the end -----------------------------------------------------------------------------------


def test_close_waits_for_everything_that_runs_and_ends_the_thread() -> None:
    mover, ended = IoLoop(), []

    async def child() -> None:
        for _ in range(50):
            await asyncio.sleep(0.0001)
        ended.append("child")

    async def job(index: int) -> None:
        await asyncio.sleep(0.001 * index)
        ended.append(f"job {index}")
        if index == 2:
            asyncio.get_running_loop().create_task(child()).add_done_callback(lambda _: None)

    transfers = [mover.submit("job", job(index)) for index in range(3)]
    mover.close()
    assert sorted(ended) == ["child", "job 0", "job 1", "job 2"]
    assert all(transfer.done() for transfer in transfers)
    mover.close()
    assert not mover._thread.is_alive()


def test_close_passes_over_jobs_that_fail() -> None:
    mover = IoLoop()
    transfer = mover.submit("bad", fail(ValueError("broken")))
    mover.close()
    assert isinstance(transfer.wait(), ValueError)


def test_posting_after_close_raises_and_drops_the_job() -> None:
    mover = IoLoop()
    mover.close()
    job = answer(1)
    with pytest.raises(StateError, match=r"unit 3: .*closed"):
        mover.submit("unit 3", job)
    assert inspect.getcoroutinestate(job) == inspect.CORO_CLOSED


# ---- the watchdog ------------------------------------------------------------------------------


def test_the_watchdog_warns_then_raises_with_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.02)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.05)
    mover, event = IoLoop(lambda: ["read of 4,096 bytes in swap", "write of 1 byte"]), threading.Event()
    transfer = mover.submit("unit layers.3", until(event))
    in_flight = r"unit layers\.3: not finished, and no byte moved for .*read of 4,096 bytes in swap; write of 1 byte"
    with pytest.warns(RuntimeWarning, match=in_flight), pytest.raises(WatchdogError, match=in_flight):
        transfer.result()
    assert not transfer.done()
    assert mover.exposed_wait.seconds >= 0.05
    event.set()  # it was only slow
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 30.0)
    assert transfer.result() == "done"
    mover.close()


def test_the_watchdog_waits_for_kernels_and_for_bytes_of_other_engines(
    monkeypatch: pytest.MonkeyPatch, mover: IoLoop
) -> None:
    """Its clock advances with its looks, by less than it warns after; between two looks bytes move."""
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.1)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.2)
    now, writes = 0.0, False

    def perf_counter() -> float:
        nonlocal now
        if writes:
            mover.note_progress()
        now += 0.03
        return now

    async def until_late() -> str:
        until = now + 2.0
        while now < until:
            await asyncio.sleep(0.001)
        return "done"

    async def computing() -> str:
        with mover.computing():
            return await until_late()

    async def writing() -> str:
        nonlocal writes
        writes = True
        return await until_late()

    monkeypatch.setattr(offload.io.io_loop, "time", SimpleNamespace(perf_counter=perf_counter))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mover.run("updating", computing()) == "done"
        assert mover.run("writing a checkpoint", writing()) == "done"


def test_a_stalled_job_names_what_its_own_engine_has_in_flight(monkeypatch: pytest.MonkeyPatch, mover: IoLoop) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 9.0)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.05)
    event = threading.Event()
    transfer = mover.submit("writing a checkpoint", until(event), lambda: ["write of 4,096 bytes"])
    with pytest.raises(WatchdogError, match="in flight: write of 4,096 bytes"):
        transfer.result()
    event.set()


def test_the_watchdog_only_warns_while_another_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, mover: IoLoop
) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.02)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.05)
    event = threading.Event()
    threading.Timer(0.4, event.set).start()

    async def behind_another() -> str:
        with external_wait():
            return await until(event)

    transfer = mover.submit("the gradient of layers.3", behind_another())
    with pytest.warns(RuntimeWarning, match="not finished, and no byte moved for"):
        assert transfer.result() == "done"
    assert not has_external_wait()


def test_a_job_that_ends_after_the_warning_is_not_an_error(monkeypatch: pytest.MonkeyPatch, mover: IoLoop) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.02)
    event = threading.Event()
    transfer = mover.submit("slow", until(event))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        real = warnings.warn

        def warn_then_let_go(*args: object, **names: object) -> None:
            real(*args, **names)  # type: ignore[arg-type]
            event.set()

        monkeypatch.setattr(warnings, "warn", warn_then_let_go)
        assert transfer.result() == "done"
    assert ["slow: not finished, and no byte moved for" in str(warning.message) for warning in seen] == [True]
    assert "in flight: nothing" in str(seen[0].message)


def test_a_job_that_raises_a_timeout_of_its_own_does_not_feed_the_watchdog(
    monkeypatch: pytest.MonkeyPatch, mover: IoLoop
) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TimeoutError, match="my own"):
            mover.run("job", fail(TimeoutError("my own")))


def test_only_waiting_counts_as_exposed(mover: IoLoop) -> None:
    transfer = mover.submit("quick", answer(1))
    while not transfer.done():
        pass
    transfer.result()
    assert mover.exposed_wait.seconds == 0.0
    event = threading.Event()
    waiting = mover.submit("slow", until(event))
    threading.Timer(0.02, event.set).start()
    waiting.result()
    assert mover.exposed_wait.seconds > 0.0


def test_a_stopwatch_counts_nested_uses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 17.0, 100.0, 101.0])
    monkeypatch.setattr("offload.timeline.time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch.running(), watch.running():
        pass
    assert watch.seconds == 7.0
    with pytest.raises(ValueError), watch.running():
        raise ValueError
    assert watch.seconds == 8.0
