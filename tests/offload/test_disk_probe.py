"""A disk is measured without leaving anything behind, and trouble has a name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError, StorageError
from offload.io import disk_identity, probe
from offload.io.aio import AioFault
from offload.io.disk_identity import identify
from offload.io.probe import ProbeFile, measure_disk, mixed_speed
from offload.system import linux

MIB = 1 << 20


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files and short runs: the figures mean nothing, everything else is as it is."""
    measure = ProbeFile.measure
    for name, value in (("FILE_BYTES_MAX", 16 * MIB), ("QUICK_FILE_BYTES_MAX", 16 * MIB), ("RECORD_BYTES", MIB)):
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(ProbeFile, "measure", lambda self, kind, seconds: measure(self, kind, 0.001))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_measurement_has_every_figure_and_leaves_nothing_behind(tmp_path: Path, quick: None) -> None:
    before = descriptors()
    speed = measure_disk(tmp_path)
    assert min(speed.read, speed.write, speed.mixed) > 0
    assert str(speed).startswith("read ") and str(speed).count("B/s") == 3
    assert mixed_speed(tmp_path) > 0
    assert list(tmp_path.iterdir()) == [] and descriptors() == before


def test_only_what_was_filled_is_read(tmp_path: Path, quick: None) -> None:
    with ProbeFile(tmp_path, 64 * MIB, fill_seconds=0.0) as file:
        assert file._records == probe.RECORDS_IN_FLIGHT  # one record of each buffer
        assert file.measure("read", 0.001) > 0


@pytest.mark.parametrize("trouble", ["a fault", "an interrupt"])
def test_a_measurement_that_ends_early_leaves_nothing_in_flight(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    before = descriptors()
    error = StorageError if trouble == "a fault" else KeyboardInterrupt
    with pytest.raises(error), ProbeFile(tmp_path, 16 * MIB, fill_seconds=0.01) as file:
        if trouble == "a fault":
            file._aio.inject(AioFault(seed=1, fail_rate=1.0, count_max=1))
        else:
            monkeypatch.setattr(file._loop, "wait_for", interrupt_once(file._loop.wait_for))
        file.measure("mixed", 0.1)
    assert file._aio.in_flight() == [] and descriptors() == before


def interrupt_once(wait: Any) -> Any:
    waits: list[str] = []

    def interrupted(what: str, *arguments: Any) -> None:
        waits.append(what)
        if len(waits) == 1:
            raise KeyboardInterrupt
        wait(what, *arguments)

    return interrupted


def test_a_disk_without_room_is_refused_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(linux, "reserve", full)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        measure_disk(tmp_path)
    assert caught.value.path == str(tmp_path)
    monkeypatch.setattr(probe, "FREE_BYTES_MIN", 1 << 62)
    with pytest.raises(ConfigError, match="free bytes"):
        measure_disk(tmp_path)
    assert descriptors() == before and list(tmp_path.iterdir()) == []


def test_folders_of_one_file_system_are_one_device_and_others_are_not(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    here = identify(tmp_path)
    assert identify(inside) == here != identify(Path("/proc"))
    assert here.name and here.file_system


def test_a_system_that_tells_nothing_still_gives_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_identity, "SYSFS", tmp_path / "absent")
    monkeypatch.setattr(disk_identity, "MOUNTINFO", tmp_path / "absent")
    assert str(identify(tmp_path)) == ""
