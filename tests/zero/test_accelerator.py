"""What this process computes on: who chooses a device hears the environment, and every thread has the right one."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import pretend_accelerator
from torch.distributed import HashStore

import zero
from native import NativeUnavailable
from offload import accelerator
from offload.accelerator import KINDS, compute_device, device_count, has_gpu, load_native, new_event
from offload.errors import StateError
from offload.io.aio import AioOptions, open_aio
from offload.io.io_loop import IoLoop
from offload.memory import host_memory
from offload.memory.device_poison import GRANULE_BYTES, poison_bytes
from offload.memory.flat_storage import FlatStorage, Poison
from offload.streams import DeviceStreams, Streams, open_streams
from offload.system.worker import Worker
from zero.compat.accelerator_names import get_accelerator
from zero.dist.failure_state import FailureState
from zero.dist.sequence import OperationLog
from zero.dist.watchdog import StatusBoard, Watchdog
from zero.flops_profiler import _now
from zero.launch.job import _pool
from zero.plan.machine import read_machine
from zero.store.rng_tracker import CudaRNGStatesTracker

THIRD = torch.device("cuda", 3)


def on_the_third(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> list[str]:
    """The process computes on the third device; the result gets the names of threads that choose it."""
    chosen: list[str] = []

    def set_device(device: torch.device) -> None:
        assert device == THIRD
        chosen.append(threading.current_thread().name)

    pretend_accelerator(monkeypatch, current_device=lambda: 3, set_device=set_device, **functions)
    return chosen


# ---- the environment ---------------------------------------------------------------------------------------------


def draw_in_a_fork() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("other", 1)
    with tracker.fork("other"):
        torch.rand(1)


def checkpoint_with_boundaries() -> None:
    zero.checkpointing.configure(None, synchronize=True)
    try:
        zero.checkpointing.checkpoint(torch.sin, torch.ones(2))
    finally:
        zero.checkpointing.reset()


def pin_a_page() -> None:
    host_memory.pin(torch.zeros(4096, dtype=torch.uint8))


CHOICES: dict[str, Callable[[], object]] = {
    "random states": draw_in_a_fork,
    "checkpoints": checkpoint_with_boundaries,
    "profiler": _now,
    "pinning": pin_a_page,
    "compute device": compute_device,
}


@pytest.mark.parametrize("variable", ["ZERO_DEVICE", "DS_ACCELERATOR"])
@pytest.mark.parametrize("choice", CHOICES)
def test_who_chooses_a_device_leaves_the_gpu_alone_if_the_environment_says_cpu(
    monkeypatch: pytest.MonkeyPatch, choice: str, variable: str
) -> None:
    asked: list[str] = []
    names = ("get_rng_state", "set_rng_state", "manual_seed", "synchronize", "current_device", "is_initialized")

    def noting(name: str) -> Callable[..., Any]:
        def ask(*_: Any) -> Any:
            asked.append(name)
            return torch.get_rng_state() if name == "get_rng_state" else 0 if name == "current_device" else True

        return ask

    def refuse(device: torch.device) -> Any:
        asked.append("native library")
        raise NativeUnavailable("a test")

    monkeypatch.setattr(host_memory, "load_native", refuse)
    pretend_accelerator(monkeypatch, **{name: noting(name) for name in names})
    with pytest.warns(UserWarning, match="pinning") if choice == "pinning" else monkeypatch.context():
        CHOICES[choice]()
    assert asked, "without the variable the GPU is what is chosen"
    asked.clear()
    monkeypatch.setenv(variable, "cpu")
    CHOICES[choice]()
    assert asked == []


def test_a_launcher_counts_no_gpus_if_the_environment_says_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch, device_count=lambda: 4)
    options = argparse.Namespace(hostfile=None, num_gpus=None, num_nodes=1, no_ssh=False)
    assert device_count() == 4 and _pool(options, device_count())[0] == {"localhost": 4}
    for variable in ("ZERO_DEVICE", "DS_ACCELERATOR"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "cpu")
            assert device_count() == 0 and _pool(options, device_count())[0] == {"localhost": 1}


def test_what_torch_sees_and_the_engine_does_not_know_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch, "mps")
    assert not has_gpu() and compute_device() == torch.device("cpu") and device_count() == 0


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_accelerator_object_of_its_collectives(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend_accelerator(monkeypatch, name)
    there = get_accelerator()
    kind = KINDS[name]
    assert (there.device_name(1), there.communication_backend_name()) == (f"{name}:1", kind.collective_backend)
    assert there.visible_devices_envs() == [kind.visible_variable]


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_that_torch_holds_without_using_it_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(
        monkeypatch,
        mem_get_info=lambda device: (5 << 30, 80 << 30),
        memory_reserved=lambda device: 60 << 30,
        memory_allocated=lambda device: 10 << 30,
    )
    assert read_machine(torch.device("cuda", 0)).device_bytes == 55 << 30


def test_a_plan_for_a_kind_that_is_not_here_counts_one_granule_of_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert poison_bytes(1 << 30, torch.device("cuda")) == GRANULE_BYTES
    assert poison_bytes(0, torch.device("cuda")) == poison_bytes(1 << 30, torch.device("cpu")) == 0


def test_storages_of_a_kind_without_aliases_copy_what_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind is the host's: its memory is read here, and nothing else of it is used."""
    monkeypatch.setitem(KINDS, "cpu", accelerator.AcceleratorKind("cpu", "nothing", "gloo", "NOTHING"))
    cpu = torch.device("cpu")
    storage = FlatStorage(100, torch.float32, [(0, torch.Size([10, 10]))], Poison(400, cpu), cpu)
    arena = torch.zeros(800, dtype=torch.uint8)
    part = arena[400:]
    part.view(torch.float32).fill_(7.0)
    storage.bind(part)
    assert bool((storage.views[0] == 7).all())
    storage.views[0].fill_(8.0)
    assert storage.unbind() is part and bool((part.view(torch.float32) == 8).all())
    assert bool((arena[:400] == 0).all()) and storage.flat.untyped_storage().nbytes() == 0
    with pytest.raises(StateError, match="expected a storage of 400 bytes, got 396"):
        storage.bind(arena[:396])


# ---- what kinds differ in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_threads_sleep_for_events_of_every_kind_that_can(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend_accelerator(monkeypatch, name, Event=lambda **given: given)
    device: Any = argparse.Namespace(type=name, index=0)
    assert new_event(device) == ({"blocking": True} if name != "xpu" else {})


def test_a_kind_without_a_native_library_says_so() -> None:
    device: Any = argparse.Namespace(type="npu", index=0)
    with pytest.raises(NativeUnavailable, match="there is no native library for npu"):
        load_native(device)


def test_streams_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch, Stream=lambda device: object(), synchronize=lambda device: None)
    streams = open_streams(torch.device("cuda", 0))
    assert type(streams) is DeviceStreams and type(open_streams(torch.device("cpu"))) is Streams
    streams.close()


# ---- threads -----------------------------------------------------------------------------------------------------


async def nothing() -> str:
    return threading.current_thread().name


def test_a_mover_computes_where_the_thread_that_made_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = on_the_third(monkeypatch)
    mover = IoLoop()
    assert mover.run("a job", nothing()) == "zero-io-loop" and chosen == ["zero-io-loop"]
    mover.close()


def test_the_mover_of_an_engine_computes_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = on_the_third(
        monkeypatch, Stream=lambda device: device, set_stream=lambda stream: None, synchronize=lambda device: None
    )
    streams = DeviceStreams(THIRD)
    mover = IoLoop(initializer=streams.enter_io_thread)
    assert mover.run("a job", nothing()) == "zero-io-loop" and chosen == ["zero-io-loop"]
    mover.close()
    streams.close()


def test_threads_that_wait_for_fences_do_so_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = on_the_third(monkeypatch, Stream=lambda device: device, synchronize=lambda device: None)

    class Passing:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            self.thread = threading.current_thread().name

    streams, fence, mover = DeviceStreams(THIRD), Passing(), IoLoop(initializer=lambda: None)
    mover.run("waiting", streams.synchronize(fence))
    assert chosen == [fence.thread] and fence.thread.startswith("zero-fence")
    mover.close()
    streams.close()


def test_threads_of_a_worker_and_of_the_io_in_python_have_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = on_the_third(monkeypatch)
    worker, mover = Worker("a worker"), IoLoop(initializer=lambda: None)
    assert mover.run("a job", worker.run(lambda: threading.current_thread().name)) == "a worker"
    worker.close()
    aio: Any = open_aio(AioOptions(backend="aiofiles", threads=1))
    aio._pool.submit(int).result()
    aio.close()
    mover.close()
    assert chosen[0] == "a worker" and chosen[1].startswith("zero-aio") and len(chosen) == 2


def test_a_process_that_uses_no_device_chooses_none_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = on_the_third(monkeypatch, is_initialized=lambda: False)
    mover = IoLoop()
    mover.run("a job", nothing())
    mover.close()
    assert chosen == []


def test_a_worker_whose_thread_cannot_have_the_device_says_so_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("no such device")

    pretend_accelerator(monkeypatch, set_device=refuse)
    worker, mover = Worker("a worker"), IoLoop(initializer=lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such device"):
            mover.run("a job", worker.run(int))
    worker.close()
    mover.close()


# ---- the watch of a rank -----------------------------------------------------------------------------------------


class Broken:
    """A fence of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access")


def test_a_watch_lives_on_its_device_and_ends_the_fate_of_a_rank_whose_device_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen, fate, told = on_the_third(monkeypatch), FailureState(), Future[BaseException]()

    class Listener:
        def on_failure(self, error: BaseException) -> None:
            told.set_result(error)

    listener = Listener()
    fate.add_listener(listener)
    watch = Watchdog(StatusBoard(HashStore(), 0, 2), OperationLog(), fate, 0, 2, 0.3, lambda: None)
    try:
        with watch.waiting(0, "gather of unit 4") as wait:
            wait.event = Broken()
        assert "rank 0: gather of unit 4: its device failed: RuntimeError: an illegal" in str(told.result(30))
        assert chosen == ["zero-watch"] and not watch.is_waiting
    finally:
        watch.stop()
