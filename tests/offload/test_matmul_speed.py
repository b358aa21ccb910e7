"""How much slower bf16 products are: best of the repeats, measured once, and the dtype that follows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from offload import accelerator
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


@pytest.mark.parametrize(
    ("slowdown", "told"), [(0.5, ""), (2.0, ""), (12.4, "bf16 matmuls take 12 times as long on this CPU")]
)
def test_bf16_is_slow_where_it_clearly_is(monkeypatch: pytest.MonkeyPatch, slowdown: float, told: str) -> None:
    monkeypatch.setattr(matmul_speed, "bf16_slowdown", lambda device: slowdown)
    assert matmul_speed.slow_bf16(CPU) == told


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


@pytest.mark.parametrize(("computes", "told"), [(True, ""), (False, "this GPU has no instructions for bf16")])
def test_a_gpu_is_asked_and_not_measured(monkeypatch: pytest.MonkeyPatch, computes: bool, told: str) -> None:
    monkeypatch.setattr(matmul_speed, "has_bf16", lambda device: computes)
    monkeypatch.setattr(matmul_speed, "layer_seconds", None)
    assert matmul_speed.slow_bf16("cuda:0") == told


def test_the_real_measurement_leaves_torchs_threads_as_they_are() -> None:
    before = torch.get_num_threads()
    assert matmul_speed.bf16_slowdown("cpu") > 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("module", [SimpleNamespace(is_bf16_supported=lambda: False), SimpleNamespace()])
def test_a_device_whose_torch_knows_no_emulation_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace
) -> None:
    monkeypatch.setattr(accelerator, "module_of", lambda device: module)
    assert accelerator.has_bf16(torch.device("cuda")) == (not hasattr(module, "is_bf16_supported"))
