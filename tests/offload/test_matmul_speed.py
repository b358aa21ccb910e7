"""How much slower bf16 products are: best of the repeats, measured once, and the dtype that follows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload.kernels import matmul_speed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    matmul_speed._slowdown.cache_clear()
    yield
    matmul_speed._slowdown.cache_clear()


def test_the_slowdown_is_bf16_over_fp32_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def seconds(device: torch.device, dtype: torch.dtype) -> float:
        asked.append(dtype)
        return 0.012 if dtype == torch.bfloat16 else 0.001

    monkeypatch.setattr(matmul_speed, "layer_seconds", seconds)
    assert matmul_speed.bf16_slowdown("cpu") == matmul_speed.bf16_slowdown(CPU) == pytest.approx(12)
    assert asked == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("slowdown", "dtype"), [(0.5, torch.bfloat16), (2.0, torch.bfloat16), (2.1, torch.float32)])
def test_fp32_is_taken_where_bf16_is_clearly_slower(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(matmul_speed, "bf16_slowdown", lambda device: slowdown)
    assert matmul_speed.faster_dtype(CPU) == dtype


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        ([0.004, 0.001, 0.002, 0.003, 0.003, 0.002, 0.001, 0.002], 0.001),  # as many as there may be
        ([0.5, 0.1, 0.01], 0.01),  # time is up, but the first ones are no measure
    ],
)
def test_the_best_repeat_counts_and_slow_ones_are_few(
    monkeypatch: pytest.MonkeyPatch, repeats: list[float], expected: float
) -> None:
    clock = [0.0]
    for seconds in repeats:
        clock += [clock[-1], clock[-1] + seconds]
    times = iter(clock)  # read at the beginning, then before and after each repeat
    monkeypatch.setattr(matmul_speed.time, "perf_counter", lambda: next(times))
    assert matmul_speed.layer_seconds(CPU, torch.float32) == pytest.approx(expected)
    assert next(times, None) is None


@pytest.mark.parametrize(("emulated", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_gpu_is_asked_and_not_measured(monkeypatch: pytest.MonkeyPatch, emulated: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(matmul_speed, "computes_bf16", lambda device: not emulated)
    monkeypatch.setattr(matmul_speed, "layer_seconds", None)
    assert matmul_speed.faster_dtype("cuda:0") == dtype


def test_the_real_measurement_leaves_torchs_threads_as_they_are() -> None:
    before = torch.get_num_threads()
    assert matmul_speed.bf16_slowdown("cpu") > 0
    assert torch.get_num_threads() == before
