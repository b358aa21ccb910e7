"""Disk faults under a training engine: absorbed without a trace, or raised with everything one needs to know.

The faults come from below the chunk logic, so resuming, retrying and reporting are the code under test.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import micro_batch, reference_of
from models import ADAMW, build, make_config, tokens, trainability
from probe import storage_of
from recovery import once_more
from reference import Hyper, Reference, differences, round_half_away, snapshot

import zero
from offload.errors import ConfigError, StorageError, ZeroInfinityError
from offload.io.aio import AioFault, AiofilesAio, AioOptions, NativeAio, open_aio

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")
STEPS = 5


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend this machine has, forced for the engine of the test."""
    name = str(request.param)
    try:
        open_aio(AioOptions(backend=name)).close()
    except ConfigError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("ZERO_AIO_BACKEND", name)
    return name


ABSORBED = {
    "EINTR": AioFault(errno=errno.EINTR, fail_rate=0.3),
    "EAGAIN": AioFault(errno=errno.EAGAIN, fail_rate=0.3),
    "short": AioFault(short_rate=0.5),
    "delay": AioFault(delay_rate=0.25, delay_seconds=0.002),
    "all at once": AioFault(
        errno=errno.EINTR, fail_rate=0.25, short_rate=0.25, delay_rate=0.1, delay_seconds=0.001, seed=2
    ),
}


def names() -> tuple[tuple[str, bool], ...]:
    return trainability(build("gpt"))


@pytest.mark.parametrize("kind", ABSORBED.values(), ids=ABSORBED.keys())
def test_faults_that_pass_are_absorbed_without_a_changed_bit(
    open_engine: Open, nvme_path: Any, backend: str, kind: AioFault
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    assert engine.statistics().aio_backend == backend
    reference = reference_of()
    engine.inject(kind)
    for index in range(STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    engine.inject(None)
    assert differences(snapshot(engine, names()), snapshot(reference, names())) == []
    done = storage_of(engine).disk.aio.stats()
    assert done.retried > 0 or not kind.fail_rate, "no transfer was hit"
    assert done.resumed > 0 or not kind.short_rate, "no transfer was cut short"


def next_error(engine: Any, first: int) -> StorageError:
    """Train until the fault surfaces: within two steps, or when somebody waits for the last of them."""
    try:
        for index in range(first, first + 2):
            micro_batch(engine, index)
        engine.synchronize()
    except StorageError as error:
        return error
    raise AssertionError("the fault was swallowed: two whole steps passed without an error")


FAILING = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


@pytest.mark.parametrize("code", FAILING.values(), ids=FAILING.keys())
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_that_stays_raises_with_path_offset_errno_and_free_space(
    open_engine: Open, nvme_path: Any, backend: str, code: int, operation: Any
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    engine.inject(AioFault(errno=code, fail_rate=1.0, ops=(operation,)))
    error = next_error(engine, 1)
    engine.inject(None)
    assert error.errno == code
    assert str(nvme_path) in error.path
    assert error.offset >= 0
    assert error.free_bytes is not None and error.free_bytes > 0
    message = str(error)
    assert errno.errorcode[code] in message and str(nvme_path) in message
    assert re.search(r"offset [\d,]+", message) and re.search(r"free space[^:]*: [\d,]+ bytes", message)


@pytest.mark.parametrize("count_max", [1, 3])
@pytest.mark.parametrize("skip", [0, 2, 7])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_after_a_failed_transfer_memory_still_holds_the_truth(
    open_engine: Open, nvme_path: Any, operation: Any, skip: int, count_max: int
) -> None:
    """A few transfers fail somewhere in step 3 or 4. Once the disk is well again every parameter is as after the last
    step that was called, weight, master and moments alike."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 4096}))
    reference = reference_of()
    for index in range(2):
        micro_batch(engine, index)
    engine.inject(AioFault(fail_rate=1.0, ops=(operation,), skip=skip, count_max=count_max))
    next_error(engine, 2)
    engine.inject(None)
    once_more(engine.synchronize)
    assert engine.global_steps in (2, 3, 4)
    for index in range(engine.global_steps):
        micro_batch(reference, index)
    held = snapshot(engine, names())
    assert differences(held, snapshot(reference, names())) == []
    for name, _ in names():
        assert torch.equal(held[f"{name}/weight"], round_half_away(held[f"{name}/master"])), name


def test_training_goes_on_after_a_read_failed_in_forward(open_engine: Open, nvme_path: Any, backend: str) -> None:
    """Nothing was changed by a forward, so after the fault the run is the run without it."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_of()
    for index in range(2):
        micro_batch(engine, index)
        micro_batch(reference, index)
    engine.synchronize()  # whatever the step left to do is done now
    engine.inject(AioFault(fail_rate=1.0, ops=("read",)))
    with pytest.raises(StorageError):
        engine.eval()
        with torch.no_grad():
            engine(tokens(90))
    engine.inject(None)
    engine.train()
    for index in range(2, 4):
        micro_batch(engine, index)
        micro_batch(reference, index)
    assert differences(snapshot(engine, names()), snapshot(reference, names())) == []


def test_close_after_a_fault_returns_everything(open_engine: Open, nvme_path: Any, backend: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    engine.inject(AioFault(fail_rate=1.0))
    next_error(engine, 1)
    engine.close()
    assert os.listdir(nvme_path) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_fault_during_initialisation_raises_and_leaves_nothing(
    nvme_path: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writes fail: initialize itself raises, or the first call that needs what was not stored."""
    kind: Any = AiofilesAio if backend == "aiofiles" else NativeAio
    construct = kind.__init__

    def faulty(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        self.inject(AioFault(fail_rate=1.0, ops=("write",)))

    monkeypatch.setattr(kind, "__init__", faulty)
    with pytest.raises(StorageError):
        engine = zero.initialize(model=build("gpt"), config=make_config(NVME, nvme_path))[0]
        try:
            micro_batch(engine, 0)
            engine.full_parameter("head.weight")
        finally:
            engine.close()
    assert os.listdir(nvme_path) == []


def test_the_backend_that_the_configuration_names_trains_with_the_same_bits(
    open_engine: Open, nvme_path: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERO_AIO_BACKEND")
    engine = open_engine(build("gpt"), {**make_config(NVME, nvme_path), "aio": {"backend": backend}})
    reference = reference_of()
    for index in range(STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    assert engine.statistics().aio_backend == backend
    assert differences(snapshot(engine, names()), snapshot(reference, names())) == []


def test_a_forced_backend_that_is_missing_is_an_error_that_names_it(
    nvme_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_AIO_BACKEND", "carrier_pigeon")
    with pytest.raises(ZeroInfinityError, match="carrier_pigeon"):
        zero.initialize(model=build("gpt"), config=make_config(NVME, nvme_path))


@pytest.mark.parametrize("seed", range(4))
def test_storms_of_passing_faults_never_change_a_number(open_engine: Open, nvme_path: Any, seed: int) -> None:
    storm = AioFault(errno=errno.EAGAIN, fail_rate=0.2, short_rate=0.2, delay_rate=0.1, delay_seconds=0.0005, seed=seed)
    engine = open_engine(build("mixed"), make_config(NVME, nvme_path, accumulation=2, zero={"sub_group_size": 4096}))
    hyper = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
    reference = Reference(build("mixed"), lambda name: hyper, accumulation=2)
    engine.inject(storm)
    for index in range(2 * STEPS):
        micro_batch(engine, index)
        micro_batch(reference, index)
    engine.inject(None)
    both = trainability(build("mixed"))
    assert differences(snapshot(engine, both), snapshot(reference, both)) == []
