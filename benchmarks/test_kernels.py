"""How long does each CPU kernel take per instruction set, and is it slower than in the stored run?

    python -m benchmarks.test_kernels                             compare with the newest stored run
    python -m benchmarks.test_kernels --benchmark-save=kernels    the same, and store this run in benchmarks/results

What follows is passed on to pytest: `-k adamw`, `--benchmark-compare-fail=median:10%`. Runs of two machines say nothing
about the code: store a run of this machine before a change, and compare after it. `test_copy` is a floor: torch copies
four bytes an element and computes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import native
from offload.kernels import kernels

NUMEL = 4 << 20


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has."""
    lib = native.load().lib
    if lib.zn_cpu_isa_select(request.param.encode()) != 0:
        pytest.skip(f"this CPU lacks {request.param}")
    yield request.param
    lib.zn_cpu_isa_select(b"best")


def random_bf16() -> Tensor:
    return torch.randn(NUMEL).bfloat16()


def zero_remainders() -> Tensor:
    return torch.zeros(NUMEL, dtype=torch.int16)


def adamw(weight: Tensor, master: Tensor | None) -> tuple[object, ...]:
    segment = kernels.Segment(
        begin=0, end=NUMEL, step_size=1e-3, bias2_sqrt=1.0, decay=0.9999, l2=0.0, beta1=0.9, beta2=0.999, eps=1e-8
    )
    moments = kernels.Moments(torch.zeros(NUMEL), torch.zeros(NUMEL))
    return kernels.adamw, weight, master, moments, random_bf16(), [segment]


def empty_bf16() -> Tensor:
    return torch.empty(NUMEL, dtype=torch.bfloat16)


KERNELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "adamw, bf16 weight and remainder": lambda: adamw(random_bf16(), zero_remainders()),
    "adamw, fp32 weight": lambda: adamw(torch.randn(NUMEL), None),
    "accumulate": lambda: (kernels.accumulate, torch.zeros(NUMEL), random_bf16()),
    "block_sumsq": lambda: (kernels.block_sumsq, random_bf16()),
    "cast": lambda: (kernels.cast, empty_bf16(), torch.randn(NUMEL)),
    "cast_sumsq": lambda: (kernels.cast_sumsq, torch.empty(NUMEL), random_bf16()),
    "crc32c": lambda: (kernels.crc32c, torch.randn(NUMEL)),
    "join": lambda: (kernels.join, torch.empty(NUMEL), random_bf16(), zero_remainders()),
    "reduce_ranks": lambda: (kernels.reduce_ranks, torch.empty(NUMEL), [random_bf16(), random_bf16()]),
    "split": lambda: (kernels.split, empty_bf16(), zero_remainders(), torch.randn(NUMEL)),
}
"""Name -> a function that returns the kernel and its arguments."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark: BenchmarkFixture, kernel: str, isa: str) -> None:
    benchmark.group = kernel
    torch.manual_seed(0)
    benchmark(*KERNELS[kernel]())


def test_copy(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "copy of fp32"
    benchmark(torch.empty(NUMEL).copy_, torch.randn(NUMEL))


class MachineWithoutName:
    """A stored run names the processor and the versions, and not the host."""

    @staticmethod
    def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
        del machine_info["node"], machine_info["release"]
        machine_info["cpu"] = {"brand_raw": machine_info["cpu"].get("brand_raw", "unknown")}


def run(arguments: list[str]) -> int:
    options = ["--benchmark-columns=min,median,iqr,rounds", "--benchmark-sort=name"]
    stored = "--benchmark-storage=file://benchmarks/results"
    files = ["benchmarks/test_kernels.py", "-q", "-p", "no:cacheprovider"]
    return pytest.main([*files, *options, stored, "--benchmark-compare", *arguments], plugins=[MachineWithoutName()])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
