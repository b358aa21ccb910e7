"""Common code of the tests of faults, interrupts and closing: trainers to compare, failing disks, and checks."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import HYPER, train
from models import build, make_config, tokens
from probe import disk_of, is_waiting, mover_of, put_disk, storage_of, swapped_range, updates_of
from reference import Hyper, Reference
from torch import Tensor

import zero
from offload.errors import BudgetError, StorageError
from offload.io.aio import AioFault
from zero.params.released_parameter import ReleasedParameter

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
HELD = AioFault(delay_rate=1.0, delay_seconds=math.inf)
"""Transfers wait until the next `inject`."""


def failing(operation: Any, **more: Any) -> AioFault:
    return AioFault(fail_rate=1.0, ops=(operation,), **more)


# ---- training -------------------------------------------------------------------------------------------------------


def scheduled(model: Any, pair: tuple[str, str], nvme_path: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `initialize` with a learning rate that halves every step, so that a repeated step is visible."""
    return {
        "model": model,
        "config": make_config(pair, nvme_path, **more),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done),
    }


def scheduled_reference(accumulation: int = 1, model: str = "gpt") -> Reference:
    done = 0

    def stepped() -> None:
        nonlocal done
        done += 1

    def hyper_of(name: str) -> Hyper:
        return replace(HYPER, lr=HYPER.lr * 0.5**done)

    return Reference(build(model), hyper_of, accumulation=accumulation, on_step=stepped)


@cache
def scheduled_run(steps: int, accumulation: int = 1) -> Reference:
    """The scheduled reference after so many steps. It is shared: compare with it, but do not train it."""
    return train(scheduled_reference(accumulation), *range(steps * accumulation))  # type: ignore[no-any-return]


@cache
def early_exit_run() -> Reference:
    """Likewise, with three steps; the second step skips the blocks after the first."""
    reference = train(scheduled_reference(model="early_exit"), 0)
    reference.backward(reference(tokens(1), 1))
    reference.step()
    return train(reference, 2)  # type: ignore[no-any-return]


# ---- calls that wait for the pending updates of a step --------------------------------------------------------------


def _gathered(engine: Any) -> None:
    with zero.GatheredParameters([engine.module.norm.bias]):
        pass


LOOKS: dict[str, Callable[[Any], Any]] = {
    "synchronize": lambda engine: engine.synchronize(),
    "forward": lambda engine: engine(tokens(9)),
    "eval": lambda engine: torch.no_grad()(engine)(tokens(9)),
    "full_parameter": lambda engine: engine.full_parameter("norm.bias"),
    "full_state": lambda engine: engine.full_state("head.weight"),
    "named_full_parameters": lambda engine: list(engine.named_full_parameters()),
    "gathering": _gathered,
}


def once_more(action: Callable[[], Any], attempts: int = 4) -> int:
    """Repeat `action` while it raises StorageError; returns how often it did. A failed prefetch is reported when its
    unit is needed, even if the disk works again by then."""
    for failed in range(attempts):
        try:
            action()
        except StorageError:
            continue
        return failed
    raise AssertionError(f"still failing after {attempts} attempts on a disk that is well again")


# ---- disks ----------------------------------------------------------------------------------------------------------


class FaultyDisk:
    """The disk of one plane; the next transfer of the plane's home number `home` fails once."""

    def __init__(self, plane: Any, operation: str, home: int) -> None:
        self._disk, self._operation, self.met = disk_of(plane), operation, False
        self._offset = plane.homes[home].swap_offset

    async def read(self, offset: int, buffer: Tensor, what: str = "") -> None:
        self._fail("read", offset)
        await self._disk.read(offset, buffer, what)

    async def write(self, offset: int, buffer: Tensor, what: str = "") -> None:
        self._fail("write", offset)
        await self._disk.write(offset, buffer, what)

    def _fail(self, operation: str, offset: int) -> None:
        if operation == self._operation and offset == self._offset and not self.met:
            self.met = True
            raise StorageError(operation, errno=5, path="plane", offset=offset, free_bytes=None)


def break_gradients(engine: Any, operation: str, home: int) -> FaultyDisk:
    (plane,) = (plane for plane in storage_of(engine).gradients if plane is not None)
    disk = FaultyDisk(plane, operation, home)
    put_disk(plane, disk)
    return disk


def least_host_bytes(config: dict[str, Any], model: str, **sizes: Any) -> int:
    with pytest.raises(BudgetError, match="at least") as refusal:
        zero.initialize(model=build(model, **sizes), config={**config, "memory_budget": {"host": 1}})
    return int(re.findall(r"at least ([\d,]+)", str(refusal.value))[0].replace(",", ""))


def spilling(open_engine: Open, nvme_path: Path, model: str = "gpt", **more: Any) -> Any:
    """An engine whose gradients are on NVMe."""
    config = make_config(NVME, nvme_path, **more)
    config["memory_budget"] = {"host": least_host_bytes(config, model)}
    engine = open_engine(build(model), config)
    assert set(engine.plan.gradient_tiers.values()) == {"nvme"}
    return engine


# ---- interrupts -----------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_when(ready: Callable[[], bool]) -> Iterator[None]:
    """Inside, a KeyboardInterrupt is raised in the main thread as soon as `ready()`."""

    entered = False  # An interrupt before `pytest.raises` is entered would end the process.

    def interrupt(number: int, frame: Any) -> None:
        if not (entered and ready()):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0.005)  # another timer, such as the time limit of a test
    try:
        with pytest.raises(KeyboardInterrupt):
            entered = True
            yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)


def waiting(engine: Any) -> Callable[[], bool]:
    """True while the training thread waits for the mover."""
    return lambda: is_waiting(engine)


@contextmanager
def interrupted_in_hold(engine: Any, fault: AioFault | None = None) -> Iterator[None]:
    """Inside, transfers are held and the wait for them is interrupted; then only those of `fault` stay held."""

    def ready() -> bool:
        if is_waiting(engine):
            engine.inject(fault)
            return True
        return False

    with interrupted_when(ready):
        yield


def interrupted_while_waiting(engine: Any, action: Callable[[], Any]) -> None:
    """Interrupt `action` while it waits for updates of the last step, which `STABLE_BOXES` holds; they continue then.

    What cleans up after the interrupt may wait too, but not for the last record.
    """
    end = swapped_range(engine, "state_arrays")["end"]
    with interrupted_in_hold(engine, replace(HELD, begin=end - 1, end=end)):
        action()
    assert not updates_of(engine).is_idle
    engine.inject(None)


@contextmanager
def held_until_awaited(engine: Any) -> Iterator[None]:
    """Inside, transfers that `STABLE_BOXES` holds go on once the training thread waits for the I/O loop: it must."""
    mover, waits = mover_of(engine), list[str]()
    block = mover.wait_for

    def release(what: str, *more: Any) -> None:
        waits.append(what)
        engine.inject(None)
        block(what, *more)

    with mock.patch.object(mover, "wait_for", release):
        yield
    assert waits, "nothing has waited for a transfer"


# ---- forks -----------------------------------------------------------------------------------------------------------

FORK_SECONDS_MAX = 60.0


def in_a_fork(action: Callable[[], Any]) -> str:
    """The error of `action` in a forked child; the test fails if the child does not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            told = "no error"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode()[:4000])
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + FORK_SECONDS_MAX
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child had not ended after {FORK_SECONDS_MAX} s")
        time.sleep(0.02)
    with os.fdopen(reading) as file:
        return file.read()


# ---- ends -----------------------------------------------------------------------------------------------------------


def released(engine: Any) -> bool:
    return all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())


def movers() -> int:
    return sum(thread.name == "zero-io-loop" for thread in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def leaving_nothing(nvme_path: Path) -> Iterator[None]:
    """Inside, the test must not leave threads, descriptors or files behind.

    torch's group of one rank is made before, since it belongs to the process and outlives engines.
    """
    zero.init_distributed(verbose=False)
    threads, files = movers(), descriptors()
    yield
    for _ in range(250):  # an abandoned engine's thread ends by itself, on a busy machine later
        if movers() <= threads and descriptors() <= files:
            break
        gc.collect()
        time.sleep(0.02)
    assert movers() <= threads and descriptors() <= files
    assert os.listdir(nvme_path) == []
