"""Every question runs to its end on small inputs, with rivals and without; what it finds is not judged here."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tables
from benchmarks.common import RivalMissing
from benchmarks.rivals import deepspeed_setup, fio
from benchmarks.rivals.streaming import PREFETCH_NUMEL, StreamingBound

SMALL_SWAP = ["--size-bytes", str(4 << 20), "--record-bytes", str(1 << 20), "--block-bytes", str(64 << 10)]
SMALL_STEP = ["--width", "64", "--layers", "3", "--threads", "1"]


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, question: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a question, asked in two rounds, on a machine without DeepSpeed."""
    file = folder / "answer.json"
    monkeypatch.setattr(deepspeed_setup, "why_missing", lambda: "left out by the test")
    monkeypatch.setattr("sys.argv", [question, "--json", str(file), "--rounds", "2", *arguments])
    importlib.import_module(f"benchmarks.{question}").main()
    return dict(json.loads(file.read_text()))


def marks(content: dict[str, Any]) -> set[str]:
    return {mark["what"] for mark in content["marks"]}


@pytest.fixture
def two_threads_at_most() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise RivalMissing("left out by the test")

    monkeypatch.setattr(fio, "run", missing)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_swap_bandwidth_compares_each_kind_of_traffic_with_fio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "swap_bandwidth", "--path", str(tmp_path), *SMALL_SWAP)
    assert marks(content) == {f"{kind}: GB/s, ours / fio" for kind in ("read", "write", "mixed")}
    assert content["missing"] == {"deepspeed": "left out by the test"}
    for series in content["series"]:
        figures = series["tried"][0]["fio"]["figures"]
        assert figures["read_bytes"] + figures["write_bytes"] == 4 << 20


def test_swap_bandwidth_without_rivals_measures_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_fio(monkeypatch)
    content = answer(monkeypatch, tmp_path, "swap_bandwidth", "--path", str(tmp_path), *SMALL_SWAP)
    assert set(content["missing"]) == {"fio", "deepspeed"} and content["marks"] == []
    assert [series["name"] for series in content["series"]] == ["read", "write", "mixed"]


def test_optimizer_step_compares_with_the_same_bytes_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_threads_at_most: None
) -> None:
    no_fio(monkeypatch)
    content = answer(monkeypatch, tmp_path, "optimizer_step", "--path", str(tmp_path), *SMALL_STEP)
    assert marks(content) == {"step / (read alone + write alone)"}
    assert content["figures"]["read: bytes per parameter"] == 12
    assert content["figures"]["write: bytes per parameter"] == 12


@pytest.mark.broad
def test_adam_runs_every_kernel_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_threads_at_most: None
) -> None:
    content = answer(monkeypatch, tmp_path, "adam", "--numel", str(1 << 17))
    assert set(content["missing"]) <= {"bound", "DeepSpeedCPUAdam", "DeepSpeedCPUAdam, huge"}
    assert {"1 thread: speed, ours / torch fused", "2 threads: speed, ours / torch fused"} <= marks(content)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("prefetch_numel", PREFETCH_NUMEL)
def test_the_streaming_bound_touches_every_element_once(prefetch_numel: int, threads: int) -> None:
    try:
        bound = StreamingBound()
    except RivalMissing as error:
        pytest.skip(str(error))
    numel = 64 * 2 * 3
    chance = torch.Generator().manual_seed(0)
    halves = [torch.randint(-100, 100, (numel,), generator=chance, dtype=torch.int16) for _ in range(3)]
    singles = [torch.randint(-100, 100, (numel,), generator=chance, dtype=torch.int32) for _ in range(2)]
    weight, remainder, gradient = halves
    arrays = [weight.clone(), remainder.clone(), *(single.clone() for single in singles), gradient]
    bound.run(arrays, threads, prefetch_numel)
    unsigned = gradient.int() & 0xFFFF
    assert torch.equal(arrays[0], weight + gradient)
    assert torch.equal(arrays[1], remainder ^ gradient)
    assert torch.equal(arrays[2], singles[0] + unsigned)
    assert torch.equal(arrays[3], singles[1] ^ unsigned)


def test_the_streaming_bound_refuses_lengths_it_would_not_cover() -> None:
    try:
        bound = StreamingBound()
    except RivalMissing as error:
        pytest.skip(str(error))
    with pytest.raises(RuntimeError, match="a multiple of 128"):
        bound.run([torch.zeros(64)] * 5, 2, 0)


@pytest.mark.broad
def test_start_times_loading_initializing_and_steps_of_each_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    content = answer(monkeypatch, tmp_path, "start", "--path", str(tmp_path), "--width", "tiny", "--rounds", "1")
    places = [f"{where}{init}" for where in ("NVMe", "host memory") for init in ("", " under zero.Init")]
    parts = ("load", "initialize", "first_step", "step")
    assert all(content["figures"][f"{place}: {part}"] > 0 for place in places for part in parts)
    assert {mark.split(":")[0] for mark in marks(content)} == set(places)
    assert len(tables.starts(content).splitlines()) == 9
