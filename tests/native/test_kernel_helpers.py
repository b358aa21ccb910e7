"""The threads that help kernels: shared by all callers, gone when there is nothing to do, and a child's own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

native = pytest.importorskip("native")
try:
    NATIVE = native.load()
except native.NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
ffi, lib = NATIVE.ffi, NATIVE.lib

NUMEL = 40 * 65536 + 4099
HELPERS = 7
GONE_SECONDS = 5.0
"""Far longer than one that is idle stays."""


def splits(threads: int, times: int = 1) -> bytes:
    """Weights and remainders that some kernel makes of the same numbers."""
    source, weight, remainder = (ffi.new(f"{kind}[]", NUMEL) for kind in ("float", "uint16_t", "int16_t"))
    ffi.buffer(source)[:] = bytes(range(1, 201)) * (ffi.sizeof(source) // 200) + bytes(ffi.sizeof(source) % 200)
    for _ in range(times):
        assert lib.zn_cpu_split(weight, remainder, source, NUMEL, threads) == 0
    return bytes(ffi.buffer(weight)) + bytes(ffi.buffer(remainder))


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def most_helpers(threads: int, times: int) -> int:
    """The most helpers at one instant while `splits` runs; afterwards, on a busy machine, idle ones may have ended."""
    before, over, counts = tasks(), threading.Event(), [0]

    def look() -> None:
        others = before | {str(threading.get_native_id())}
        while not over.is_set():
            counts.append(len(tasks() - others))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        splits(threads, times)
    finally:
        over.set()
        watcher.join()
    return max(counts)


def test_helpers_are_started_once_and_end_when_there_is_nothing_to_do() -> None:
    before = tasks()
    assert 0 < most_helpers(HELPERS + 1, times=20) <= HELPERS
    end = time.monotonic() + GONE_SECONDS
    while tasks() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not tasks() - before


def test_callers_side_by_side_get_what_one_gets() -> None:
    expected, found = splits(1), list[Any]([None] * 6)

    def call(index: int) -> None:
        found[index] = splits(1 + index, times=20)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(found))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(each == expected for each in found)


def test_a_child_of_a_process_with_helpers_has_its_own() -> None:
    expected = splits(HELPERS + 1)
    busy = threading.Thread(target=splits, args=(HELPERS + 1, 200))
    busy.start()
    children = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            helpers = most_helpers(HELPERS + 1, times=20)
            os._exit(0 if helpers and splits(HELPERS + 1, times=3) == expected else 1)
        children.append(child)
    busy.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def test_a_signal_of_the_process_goes_to_a_thread_of_pythons() -> None:
    before = tasks()
    splits(HELPERS + 1)
    for task in tasks() - before:
        try:
            lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        assert all(blocked >> (number - 1) & 1 for number in (2, 10, 15))  # SIGINT, SIGUSR1, SIGTERM
