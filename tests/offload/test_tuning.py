"""Tuning: what wins clearly is chosen, what is known is remembered per device, and trouble costs nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.disk import disk_identity, probe, tuning
from offload.disk.aio import AioFault
from offload.disk.disk_identity import DeviceIdentity, identify
from offload.disk.probe import ProbeFile, Setting, measure_interleaved, mixed_speed
from offload.disk.tuning import (
    Measurement,
    Tuning,
    choose,
    combine,
    default_setting,
    load_or_probe,
    read_cached,
    write_cached,
)
from offload.errors import ConfigError, StorageError
from offload.system import linux

MIB = 1 << 20
A, B = Setting("io_uring", 2 * MIB, 32), Setting("io_uring", 4 * MIB, 32)
QUESTION = "chunk_bytes"


def identity(name: str = "nvme0n1", **more: Any) -> DeviceIdentity:
    fields = {"model": "m", "serial": "s", "size_bytes": 1, "file_system": "ext4", "kernel": "k", "engine": "e"}
    return DeviceIdentity(name=name, **{**fields, **more})


def result_for(folder: Path | None = None, **more: Any) -> Tuning:
    fields: dict[str, Any] = {
        "device": identify(folder) if folder else identity(),
        "setting": B,
        "read_bytes_per_second": 2e9,
        "write_bytes_per_second": 4e9,
        "mixed_bytes_per_second": 2.5e9,
        "measurements": (Measurement(QUESTION, A, 2e9, 1.0, 0, 7), Measurement(QUESTION, B, 2.5e9, 1.25, 7, 7)),
        "reasons": ("chunk_bytes: 4,096 KiB won",),
        "probe_seconds": 12.5,
        "measured_at": "2026-01-01T00:00:00Z",
    }
    return Tuning(**{**fields, **more})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zero-infinity" / "tuning"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small files and short bursts: the figures mean nothing, everything else is as it is."""
    real = ProbeFile.__init__

    def small(self: ProbeFile, folder: Path, fill_seconds: float, file_bytes_max: int = 0) -> None:
        real(self, folder, 0.02, 16 * MIB)

    monkeypatch.setattr(ProbeFile, "__init__", small)
    monkeypatch.setattr(probe, "BURST_SECONDS", 0.001)
    monkeypatch.setattr(probe, "RECORD_BYTES_MAX", MIB)
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    yield


# ---- choosing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("challenger", "winner"),
    [
        ([1.2] * 7, B),
        ([1.2] * 6 + [0.9], B),
        ([1.2] * 5 + [0.9] * 2, A),  # not often enough
        ([1.04] * 7, A),  # not by enough
        ([0.5] * 7, A),
    ],
)
def test_a_setting_is_replaced_only_by_one_that_wins_clearly(challenger: list[float], winner: Setting) -> None:
    chosen, reason, found = choose(QUESTION, A, {A: [1e9] * 7, B: [1e9 * factor for factor in challenger]})
    assert chosen == winner
    assert reason.startswith("chunk_bytes: ") and "KiB" in reason
    assert [m.setting for m in found] == [A, B] and found[0].ratio == 1.0


def test_rounds_are_compared_with_their_own_round() -> None:
    """A disk that gets slower meanwhile hits all alike."""
    drifting = [8e9, 4e9, 2e9, 1e9, 1e9, 1e9, 1e9]
    chosen, _, found = choose(QUESTION, A, {A: drifting, B: [1.1 * speed for speed in drifting]})
    assert chosen == B and found[1].ratio == pytest.approx(1.1) and found[1].wins == 7


def test_the_clear_winner_is_taken_also_when_a_doubtful_one_looks_faster() -> None:
    c = dataclasses.replace(A, chunk_bytes=8 * MIB)
    speeds = {A: [1.0] * 7, B: [1.1] * 7, c: [2.0] * 4 + [0.5] * 3}
    assert choose(QUESTION, A, speeds)[0] == B


def test_without_the_incumbent_the_best_backend_that_opens_is_taken() -> None:
    libaio, threads = Setting("libaio", 2 * MIB, 32), Setting("threads", 2 * MIB, 32)
    chosen, reason, _ = choose("backend", A, {libaio: [1.0] * 3, threads: [9.0] * 3})
    assert chosen == libaio and "can be opened" in reason
    with pytest.raises(ConfigError, match="none of the backend candidates"):
        choose("backend", A, {})


@pytest.mark.parametrize(("factor", "expected"), [(1.5, B), (1.0, None)])
def test_what_was_changed_is_measured_against_the_defaults_once_more(
    tmp_path: Path, cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch, factor: float, expected: Setting | None
) -> None:
    """A lucky winner of one question loses here, and then nothing has changed."""
    asked: list[list[Setting]] = []

    def measured(file: Any, settings: list[Setting], rounds: int, more: Any) -> dict[Setting, list[float]]:
        asked.append(list(settings))
        last = len(asked) == 4
        return {s: [(factor if last else 1.5) if s.chunk_bytes == 4 * MIB else 1.0] * 2 for s in settings}

    monkeypatch.setattr(tuning, "measure_interleaved", measured)
    found = tuning.probe(tmp_path)
    assert found.setting == (expected or default_setting())
    assert asked[3] == [default_setting(), B]
    assert "confirmed" in found.reasons[-1]


def test_one_engine_for_several_devices_takes_the_fastest_ones_chunk_and_every_ones_depth() -> None:
    slow = result_for(device=identity("sda"), setting=A, mixed_bytes_per_second=1e8)
    fast = result_for(device=identity("nvme0n1"), setting=B, mixed_bytes_per_second=3e9)
    assert combine([slow, fast, fast]) == dataclasses.replace(B, queue_depth=64)
    assert combine([fast]) == B
    with pytest.raises(ConfigError):
        combine([])


# ---- probing -----------------------------------------------------------------------------------


@pytest.mark.broad
def test_a_probe_answers_every_question_and_leaves_nothing_behind(tmp_path: Path, cache: Path, quick: None) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    found = tuning.probe(folder)
    assert {m.question for m in found.measurements} >= {"backend", "chunk_bytes", "queue_depth"}
    assert len(found.reasons) >= 3 and found.device == identify(folder)
    assert min(found.read_bytes_per_second, found.write_bytes_per_second, found.mixed_bytes_per_second) > 0
    assert list(folder.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == descriptors
    assert not cache.exists()  # keeping the result is the caller's business
    assert mixed_speed(folder) > 0
    assert list(folder.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == descriptors


def test_when_the_time_is_over_what_was_not_measured_is_named_and_stays(
    tmp_path: Path, cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PROBE_SECONDS_MAX", 0.0)
    found = tuning.probe(tmp_path)
    assert found.setting == default_setting() and found.measurements == ()
    assert all("time was used up" in reason for reason in found.reasons) and found.mixed_bytes_per_second > 0


def test_a_setting_that_cannot_be_opened_is_left_out(tmp_path: Path, quick: None) -> None:
    file = ProbeFile(tmp_path, 0.01)
    speeds = measure_interleaved(file, [Setting("threads", MIB, 4), Setting("aiofiles", MIB, 9999)], 2, lambda: True)
    file.close()
    assert list(speeds) == [Setting("threads", MIB, 4)] and len(speeds[Setting("threads", MIB, 4)]) == 2


@pytest.mark.parametrize("how", ["a fault", "an interrupt"])
def test_a_burst_that_ends_early_leaves_nothing_in_flight(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file = ProbeFile(tmp_path, 0.01)
    aio = file.open(Setting("threads", MIB, 8))
    if how == "a fault":
        aio.inject(AioFault(seed=1, fail_rate=1.0, count_max=1))
    else:
        file._loop.call_later(0.02, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(StorageError if how == "a fault" else KeyboardInterrupt):
        file.burst(aio, "mixed")
    assert aio.in_flight() == []
    aio.close()
    file.close()


def test_a_disk_without_room_is_refused_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(linux, "reserve", full)
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            ProbeFile(tmp_path, 0.01)
    assert caught.value.path == str(tmp_path)
    with pytest.raises(ConfigError, match="free bytes"):
        ProbeFile(tmp_path, 0.01, file_bytes_max=MIB)
    assert len(os.listdir("/proc/self/fd")) == before and list(tmp_path.iterdir()) == []


# ---- the cache ---------------------------------------------------------------------------------


def test_a_result_survives_the_cache_as_it_was(tmp_path: Path, cache: Path) -> None:
    assert read_cached(tmp_path) is None
    result = result_for(tmp_path)
    assert write_cached(result) == ""
    assert read_cached(tmp_path) == result
    newer = result_for(tmp_path, setting=A)
    assert write_cached(newer) == ""
    assert read_cached(tmp_path) == newer
    assert len(list(cache.iterdir())) == 1  # no temporary file stays


@pytest.mark.parametrize("field", ["name", "model", "serial", "file_system", "kernel", "engine"])
def test_another_device_file_system_kernel_or_engine_is_measured_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    write_cached(result_for(tmp_path))
    other = dataclasses.replace(identify(tmp_path), **{field: "other"})
    assert other.key != identify(tmp_path).key
    monkeypatch.setattr(tuning, "identify", lambda folder: other)
    assert read_cached(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe not text",
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 99}',
        b"null",
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path: Path, cache: Path, content: bytes) -> None:
    result = result_for(tmp_path)
    write_cached(result)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    assert read_cached(tmp_path) is None
    assert write_cached(result) == "" and read_cached(tmp_path) == result


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("setting", {"backend": "io_uring", "chunk_bytes": 5, "queue_depth": 32}),
        ("setting", {"backend": "tape", "chunk_bytes": MIB, "queue_depth": 32}),
        ("setting", {"backend": "io_uring", "chunk_bytes": "2", "queue_depth": 32}),
        ("mixed_bytes_per_second", -1.0),
        ("mixed_bytes_per_second", "fast"),
        ("measurements", [{"question": "backend"}]),
        ("device", {}),
        ("unknown", 1),
    ],
)
def test_values_that_make_no_sense_are_as_good_as_none(tmp_path: Path, cache: Path, key: str, value: Any) -> None:
    write_cached(result_for(tmp_path))
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert read_cached(tmp_path) is None


@pytest.mark.parametrize("blocked", ["a file in the way", "no home"])
def test_a_cache_that_cannot_be_written_costs_a_probe_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    if blocked == "a file in the way":
        (tmp_path / "cache").write_text("a file")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home folder")))
    result = result_for(tmp_path)
    assert "could not be saved" in write_cached(result)
    assert read_cached(tmp_path) is None
    monkeypatch.setattr(tuning, "probe", lambda folder: result)
    assert load_or_probe(tmp_path) == result


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert tuning.cache_folder() == tmp_path / ".cache" / "zero-infinity" / "tuning"


def test_of_several_that_ask_one_measures_and_the_others_wait(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes: a lock on a file of its own descriptor keeps both apart."""
    probes = []
    result = result_for(tmp_path)

    def measure(folder: Path) -> Tuning:
        probes.append(folder)
        return result

    monkeypatch.setattr(tuning, "probe", measure)
    found: list[Tuning] = []
    threads = [threading.Thread(target=lambda: found.append(load_or_probe(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [result] * 6 and probes == [tmp_path]


# ---- devices -----------------------------------------------------------------------------------


def test_folders_of_one_file_system_are_one_device_and_others_are_not(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    here = identify(tmp_path)
    assert identify(inside) == here and identify(inside).key == here.key
    assert identify(Path("/proc")) != here
    assert here.name and here.file_system and here.kernel == os.uname().release and len(here.engine) == 32


def test_a_system_that_tells_nothing_still_gives_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_identity, "SYSFS", tmp_path / "absent")
    monkeypatch.setattr(disk_identity, "MOUNTINFO", tmp_path / "absent")
    found = identify(tmp_path)
    assert (found.name, found.model, found.size_bytes) == ("", "", 0) and found.key
