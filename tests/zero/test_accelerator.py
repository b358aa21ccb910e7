"""What this process computes on: who chooses a device hears the environment."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretended import pretend_accelerator

import zero
from native import NativeUnavailable
from offload import accelerator, pinned
from offload.accelerator import KINDS, compute_device, device_count, has_gpu, load_native, new_event
from offload.binding import FlatStorage, Poison
from offload.errors import StateError
from offload.poison import GRANULE_BYTES, poison_bytes
from offload.streams import DeviceStreams, Streams, open_streams
from zero.compat.accelerator import get_accelerator
from zero.flops_profiler import _now
from zero.launch.job import _pool
from zero.machine import read_machine
from zero.rng_tracker import CudaRNGStatesTracker

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
    pinned.pin(torch.zeros(4096, dtype=torch.uint8))


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
    names = ("get_rng_state", "set_rng_state", "synchronize", "current_device", "is_initialized")

    def noting(name: str) -> Callable[..., Any]:
        def ask(*_: Any) -> Any:
            asked.append(name)
            return torch.get_rng_state() if name == "get_rng_state" else 0 if name == "current_device" else True

        return ask

    def refuse(device: torch.device) -> Any:
        asked.append("native library")
        raise NativeUnavailable("a test")

    monkeypatch.setattr(pinned, "load_native", refuse)
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
    assert (there.device_name(1), there.communication_backend_name()) == (f"{name}:1", kind.collectives)
    assert there.visible_devices_envs() == [kind.visible]


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
    monkeypatch.setitem(KINDS, "cpu", accelerator.Kind("cpu", "nothing", "gloo", "NOTHING"))
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
