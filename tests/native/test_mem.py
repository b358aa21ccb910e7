"""Host memory: exact sizes, alignment, everything given back, and pages that read as NaN."""

from __future__ import annotations

import errno
import mmap
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import native

HUGE, TOUCH = 1, 2
HUGE_PAGE = 2 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def zn() -> Any:
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(f"no native library: {error.reason}")


def mapped(address: int, nbytes: int) -> tuple[int, int]:
    """(bytes mapped, number of mappings) inside [address - 2 MiB, address + nbytes + 2 MiB) that this range touches."""
    total = count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        inside = min(high, address + nbytes) - max(low, address)
        if inside > 0:
            total, count = total + inside, count + 1
    return total, count


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def array(zn: Any, pointer: Any, nbytes: int) -> np.ndarray:
    return np.frombuffer(zn.ffi.buffer(pointer, nbytes), dtype=np.uint8)


@pytest.mark.parametrize("flags", [0, HUGE, TOUCH, HUGE | TOUCH])
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, HUGE_PAGE, 5 * HUGE_PAGE + 12345])
def test_memory_is_zeroed_aligned_and_returned_to_the_page(zn: Any, nbytes: int, flags: int) -> None:
    out = zn.ffi.new("void **")
    assert zn.lib.zn_mem_alloc(out, nbytes, flags) == 0
    address, rounded = int(zn.ffi.cast("uintptr_t", out[0])), -(-nbytes // PAGE) * PAGE
    assert address % (HUGE_PAGE if flags & HUGE else PAGE) == 0
    assert mapped(address, rounded)[0] == rounded
    view = array(zn, out[0], rounded)
    assert not view.any()
    view[:] = 7
    assert zn.lib.zn_mem_free(out[0], nbytes) == 0
    assert mapped(address, rounded) == (0, 0)


def test_nothing_is_mapped_beyond_the_request(zn: Any) -> None:
    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    out, nbytes, before = zn.ffi.new("void **"), 10 * HUGE_PAGE + PAGE, mapped_bytes()
    assert zn.lib.zn_mem_alloc(out, nbytes, HUGE) == 0
    assert mapped_bytes() - before == nbytes
    assert zn.lib.zn_mem_free(out[0], nbytes) == 0
    assert mapped_bytes() == before


@pytest.mark.parametrize("flags", [TOUCH, HUGE | TOUCH])
def test_touched_memory_takes_no_page_fault_when_used(zn: Any, flags: int) -> None:
    out, nbytes = zn.ffi.new("void **"), 32 << 20
    assert zn.lib.zn_mem_alloc(out, nbytes, flags) == 0
    view = array(zn, out[0], nbytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view[::PAGE] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 100 < nbytes // PAGE
    assert zn.lib.zn_mem_free(out[0], nbytes) == 0


@pytest.mark.parametrize("nbytes", [0, -1, 2**63 - 1])
def test_impossible_sizes_are_refused(zn: Any, nbytes: int) -> None:
    out = zn.ffi.new("void **")
    for status in (zn.lib.zn_mem_alloc(out, nbytes, 0), zn.lib.zn_mem_poison(out, nbytes)):
        assert status == -errno.EINVAL
    assert out[0] == zn.ffi.NULL


def test_more_memory_than_there_is_is_enomem(zn: Any) -> None:
    out = zn.ffi.new("void **")
    assert zn.lib.zn_mem_alloc(out, 2**60, 0) == -errno.ENOMEM
    assert zn.lib.zn_mem_poison(out, 2**60) == -errno.ENOMEM


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE_PAGE - PAGE, 3 * HUGE_PAGE + PAGE])
def test_poison_reads_as_nan_everywhere_and_is_private(zn: Any, nbytes: int) -> None:
    out, rounded = zn.ffi.new("void **"), -(-nbytes // PAGE) * PAGE
    assert zn.lib.zn_mem_poison(out, nbytes) == 0
    view = array(zn, out[0], rounded)
    assert (view == 0xFF).all()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.from_numpy(view).view(dtype).isnan().all()
    view[0] = 1
    assert (view[1:] == 0xFF).all()
    address = int(zn.ffi.cast("uintptr_t", out[0]))
    assert zn.lib.zn_mem_free(out[0], nbytes) == 0
    assert mapped(address, rounded) == (0, 0)


def test_poison_of_any_size_costs_little_memory_and_few_mappings(zn: Any) -> None:
    out, nbytes, before = zn.ffi.new("void **"), 40 << 30, resident_bytes()
    assert zn.lib.zn_mem_poison(out, nbytes) == 0
    address = int(zn.ffi.cast("uintptr_t", out[0]))
    total, count = mapped(address, nbytes)
    assert total == nbytes
    assert count <= 1000
    assert resident_bytes() - before < nbytes // 100
    view = array(zn, out[0], nbytes)
    assert (view[:: nbytes // 997] == 0xFF).all()
    assert zn.lib.zn_mem_free(out[0], nbytes) == 0
