"""Memory of training is there before its first use, behind the first forward; bytes and owners are as without it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import probe
import pytest
import torch
from torch import nn

import zero
from offload.memory.pool import LinearPool
from offload.memory.prefault import CHUNK_BYTES, Prefaulter
from offload.sizes import PAGE_BYTES

CPU = torch.device("cpu")
NBYTES = CHUNK_BYTES + CHUNK_BYTES // 2 + PAGE_BYTES


def pages_there(data: torch.Tensor) -> int:
    count = -(-data.numel() // PAGE_BYTES)
    there = (ctypes.c_ubyte * count)()
    status = ctypes.CDLL(None).mincore(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), there)
    assert status == 0
    return sum(page & 1 for page in there)


def ended() -> bool:
    threads = [thread for thread in threading.enumerate() if thread.name == "zero-faulting"]
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_all_pages_are_there_and_no_byte_has_changed() -> None:
    region = LinearPool(NBYTES, CPU)
    part = region.allocate(PAGE_BYTES)
    part.fill_(7)
    before = pages_there(region.data)
    Prefaulter([region])
    assert ended()
    assert before < NBYTES // PAGE_BYTES == pages_there(region.data)
    assert bool((part == 7).all())
    assert int(region.data[PAGE_BYTES:].sum()) == 0


def test_memory_that_is_closed_meanwhile_is_returned() -> None:
    regions = [LinearPool(NBYTES, CPU) for _ in range(8)]
    held = [weakref.ref(region.data.untyped_storage()) for region in regions]
    faulting = Prefaulter(regions)
    for region in regions:
        region.close()
    faulting.close()
    faulting.close()
    gc.collect()
    assert [storage() for storage in held] == [None] * 8
    assert ended()


def test_it_can_be_closed_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection on this thread may end an engine that nobody holds."""
    closed: list[threading.Thread] = []

    def closes(data: torch.Tensor) -> None:
        faulting.close()
        closed.append(threading.current_thread())

    ready = threading.Event()

    class Late(LinearPool):
        @property
        def unfaulted_data(self) -> torch.Tensor | None:
            ready.wait(60)
            return super().unfaulted_data

    monkeypatch.setattr("offload.memory.prefault.fault_in", closes)
    faulting = Prefaulter([Late(NBYTES, CPU)])
    ready.set()
    assert ended()
    assert [thread.name for thread in closed] == ["zero-faulting"]


def test_a_kernel_without_memory_ends_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuses(data: torch.Tensor) -> None:
        calls.append(data.numel())
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("offload.memory.prefault.fault_in", refuses)
    region = LinearPool(NBYTES, CPU)
    Prefaulter([region])
    assert ended()
    assert calls == [CHUNK_BYTES]
    region.allocate(NBYTES).fill_(1)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_gradients_and_states_are_there_after_the_first_forward_of_training(device: str, nvme_path: Path) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": device} | ({"nvme_path": os.fspath(nvme_path)} if device == "nvme" else {}),
        },
    }
    engine, *_ = zero.initialize(model=nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700)), config=config)
    with engine:
        storage = probe.storage_of(engine)
        planes = [region.data for region in storage.memory_pools if region.nbytes > PAGE_BYTES]

        def missing() -> int:
            return sum(-(-data.numel() // PAGE_BYTES) - pages_there(data) for data in planes)

        untouched = missing()
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(2, 700))
        assert missing() == untouched > 0
        engine.train()
        engine(torch.ones(2, 700))
        assert ended()
        assert missing() == 0
