"""Host memory with an owner: zeroed, aligned, exactly as long as asked; poison is NaN and costs nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import native
from offload.errors import BudgetError
from offload.memory.host_memory import map_host, map_poison, tensor_over, trim_heap
from offload.sizes import HUGE_PAGE_BYTES, PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
LENGTHS = [1, PAGE_BYTES, PAGE_BYTES + 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 12345]
MIB = 1 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.fixture(params=["native", "fallback"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where memory comes from: the native library, or Python's mmap."""
    if request.param == "fallback":
        monkeypatch.setenv("ZERO_NATIVE", "0")
    else:
        try:
            native.load()
        except native.NativeUnavailable as error:
            pytest.skip(f"no native library: {error.reason}")
    return str(request.param)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_memory_is_zeroed_huge_page_aligned_and_as_long_as_asked_to_the_page(source: str, nbytes: int) -> None:
    view = map_host(nbytes)
    data = tensor_over(view)
    assert len(view) == data.numel() == data.untyped_storage().nbytes() == -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    assert data.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not data.any()
    data.fill_(7)
    assert bytes(view[-3:]) == b"\7\7\7"


def test_memory_is_faulted_in_and_returned_with_its_last_holder(source: str) -> None:
    before = resident_bytes()
    data = tensor_over(map_host(128 * MIB))
    assert resident_bytes() - before > 120 * MIB
    kept = data[5 * MIB : 6 * MIB]
    kept.fill_(3)
    del data
    assert resident_bytes() - before > 120 * MIB  # a view is a holder too
    assert bool((kept == 3).all())
    del kept
    assert resident_bytes() - before < 8 * MIB


def test_two_mappings_never_share_bytes(source: str) -> None:
    first, second = (tensor_over(map_host(PAGE_BYTES + 1)) for _ in range(2))
    first.fill_(1)
    assert not second.any()
    distance = abs(first.data_ptr() - second.data_ptr())
    assert distance >= first.numel()


def test_a_mapping_the_kernel_refuses_names_the_knob(source: str) -> None:
    with pytest.raises(BudgetError, match=r"memory_budget\.host"):
        map_host(1 << 55)


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_reads_as_nan_in_every_float_type(source: str, nbytes: int, dtype: torch.dtype) -> None:
    view = map_poison(nbytes)
    assert len(view) == -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    data = tensor_over(view).view(dtype)
    assert bool(torch.isnan(data.float()).all())


@pytest.mark.parametrize("source", ["native"], indirect=True)
def test_poison_costs_no_memory(source: str) -> None:
    before = resident_bytes()
    view = map_poison(4096 * MIB)
    assert resident_bytes() - before < 16 * MIB
    assert bytes(view[4000 * MIB : 4000 * MIB + 4]) == b"\xff" * 4


def test_writing_to_poison_leaves_other_poison_alone(source: str) -> None:
    first, second = (tensor_over(map_poison(2 * HUGE_PAGE_BYTES)) for _ in range(2))
    first.zero_()
    assert bool((second == 0xFF).all())


def test_an_empty_view_gives_an_empty_tensor() -> None:
    assert tensor_over(memoryview(b""), torch.float32).shape == (0,)


def test_a_process_without_the_native_library_gets_the_same_memory() -> None:
    script = """
import native, torch
from offload.memory.host_memory import map_host, map_poison, tensor_over
try:
    native.load()
except native.NativeUnavailable:
    print("fallback")
host, poison = tensor_over(map_host(5000)), tensor_over(map_poison(5000)).view(torch.bfloat16)
print(host.numel(), host.data_ptr() % (2 << 20), int(host.sum()), poison.numel(), bool(poison.isnan().all()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ZERO_NATIVE": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["fallback", "8192", "0", "0", "4096", "True"]


def test_freed_heap_memory_goes_back_to_the_kernel() -> None:
    del [torch.ones(7 * MIB)][0]  # glibc learns that blocks of up to 28 MiB come from the heap
    blocks = [torch.ones(4 * MIB) for _ in range(8)]
    top = torch.ones(1000)  # the heap cannot simply shrink
    peak = resident_bytes()
    blocks.clear()
    trim_heap()
    assert peak - resident_bytes() > 120 * MIB
    del top


@pytest.mark.broad
def test_what_a_step_frees_is_there_for_the_next_one_without_page_faults() -> None:
    """Blocks that glibc would give back at the end of each round, since together they are longer than its limit."""
    script = """
import ctypes, gc, resource, sys
import torch
from offload.memory.host_memory import retain_heap
if sys.argv[1] == "kept":
    retain_heap()
def one_round():
    blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(10)]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    one_round()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
[one_round() for _ in range(3)]
print(max(faults() for _ in range(5)))
"""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")

    def faults(mode: str) -> int:
        command = [sys.executable, "-c", script, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)

    block_pages = (20 << 20) // PAGE_BYTES
    assert faults("kept") < block_pages // 10
    # Without us it depends on where small blocks happen to lie: one at the top of the heap, and nothing is given back.
    assert any(faults("default") >= block_pages for _ in range(6)), "the C library keeps it anyway"
