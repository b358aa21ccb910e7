"""What was measured decides how the disk is opened, unless the user has said it; never what comes out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from offload.disk import tuning
from offload.disk.aio import AioOptions
from offload.disk.disk_identity import identify
from offload.disk.probe import Setting
from offload.disk.tuning import Tuning, write_cached
from offload.errors import ConfigError
from zero.config import load_config
from zero.store.io_tuning import open_tuned, tune_io
from zero.tools import cli

KIB = 1 << 10
MEASURED = Setting("threads", 256 * KIB, 7)
DEFAULTS = (2 << 20, 32)


def result_for(folder: Path, **more: Any) -> Tuning:
    fields: dict[str, Any] = {
        "device": identify(folder),
        "setting": MEASURED,
        "read_bytes_per_second": 2e9,
        "write_bytes_per_second": 4e9,
        "mixed_bytes_per_second": 2.5e9,
        "measurements": (),
        "reasons": ("queue_depth: 7 won",),
        "probe_seconds": 12.0,
        "measured_at": "2026-01-01T00:00:00Z",
    }
    return Tuning(**{**fields, **more})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZERO_AIO_BACKEND", raising=False)
    return tmp_path / "cache" / "zero-infinity" / "tuning"


def settings_of(config: dict[str, Any], *paths: Path) -> tuple[str, int, int]:
    found = tune_io(load_config(config), [str(path) for path in paths])
    return found.backend, found.chunk_bytes, found.queue_depth


def test_without_a_result_the_defaults_are_used_and_nothing_is_measured(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tuning, "probe")
    found = tune_io(load_config({}), [str(nvme_path)])
    assert (found.backend, found.chunk_bytes, found.queue_depth) == ("auto", *DEFAULTS)
    assert found.speeds is None and found.note == ""


def test_a_known_result_is_used_for_what_the_user_has_not_said(nvme_path: Path) -> None:
    write_cached(result_for(nvme_path))
    assert settings_of({}, nvme_path) == ("threads", 256 * KIB, 7)
    assert settings_of({"aio": {"queue_depth": 3}}, nvme_path) == ("threads", 256 * KIB, 3)
    assert settings_of({"aio": {"block_size": "1MiB"}}, nvme_path) == ("threads", 1 << 20, 7)
    assert settings_of({"aio": {"block_size": 2 << 20, "queue_depth": 32}}, nvme_path) == ("threads", *DEFAULTS)
    assert settings_of({"aio": {"tune": "off"}}, nvme_path) == ("auto", *DEFAULTS)
    found = tune_io(load_config({}), [str(nvme_path)])
    assert found.speeds == (2.5e9,) and "2026-01-01" in found.note


def test_the_environment_names_the_backend_whatever_was_measured(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cached(result_for(nvme_path))
    monkeypatch.setenv("ZERO_AIO_BACKEND", "aiofiles")
    assert settings_of({}, nvme_path) == ("aiofiles", 256 * KIB, 7)


def test_a_device_that_is_not_known_leaves_all_at_the_defaults(nvme_path: Path) -> None:
    write_cached(result_for(nvme_path))
    assert settings_of({}, nvme_path, Path("/proc")) == ("auto", *DEFAULTS)


def test_what_is_not_known_is_measured_once_if_the_user_says_so(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Path] = []

    def measure(folder: Path) -> Tuning:
        probes.append(folder)
        return result_for(folder)

    monkeypatch.setattr(tuning, "probe", measure)
    for _ in range(2):
        assert settings_of({"aio": {"tune": "probe"}}, nvme_path) == ("threads", 256 * KIB, 7)
    assert probes == [nvme_path]


def test_measuring_that_fails_leaves_the_defaults_and_a_note(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> Tuning:
        raise ConfigError("probing: no room")

    monkeypatch.setattr(tuning, "probe", refuse)
    found = tune_io(load_config({"aio": {"tune": "probe"}}), [str(nvme_path)])
    assert (found.backend, found.chunk_bytes, found.queue_depth) == ("auto", *DEFAULTS)
    assert found.note == "not tuned: probing: no room"


def test_a_measured_backend_that_is_gone_gives_way_to_the_best_that_works(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cached(result_for(nvme_path, setting=dataclasses.replace(MEASURED, backend="threads")))
    tuned = tune_io(load_config({}), [str(nvme_path)])
    monkeypatch.setenv("ZERO_NATIVE", "0")
    aio = open_tuned(AioOptions(backend=tuned.backend), tuned)
    assert aio.backend == "aiofiles" and "tuned for" in aio.reason
    aio.close()
    monkeypatch.setenv("ZERO_AIO_BACKEND", "threads")
    with pytest.raises(ConfigError, match="threads"):
        open_tuned(AioOptions(backend="threads"), tuned)


@pytest.mark.parametrize("wrong", ["always", 1, True])
def test_the_key_takes_its_three_words_only(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"aio\.tune"):
        load_config({"aio": {"tune": wrong}})


# ---- zero tune ---------------------------------------------------------------------------------


def test_the_command_shows_what_is_known_and_measures_again_only_when_told(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "probe", lambda folder: result_for(folder, reasons=("measured anew",)))
    write_cached(result_for(nvme_path))
    assert cli.main(["tune", str(nvme_path)]) == 0
    out = capsys.readouterr().out
    for part in (str(nvme_path), "measured at 2026", "queue_depth: 7 won", "0.25 MiB x 7", "threads", "2.50 GB/s"):
        assert part in out
    assert cli.main(["tune", "--force", str(nvme_path)]) == 0
    assert "measured anew" in capsys.readouterr().out
    assert cli.main(["tune", str(nvme_path)]) == 0
    assert "measured anew" in capsys.readouterr().out  # it was kept


def test_the_command_prints_json_with_the_keys_of_the_configuration(
    nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cached(result_for(nvme_path))
    second = nvme_path / "second"
    second.mkdir()
    assert cli.main(["tune", "--json", str(nvme_path), str(second)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["chosen"] == {"backend": "threads", "block_size": 256 * KIB, "queue_depth": 7}
    assert [entry["source"] for entry in printed["paths"]] == ["cache", "cache"]
    assert printed["stripes"] == [1, 1]
    assert printed["paths"][0]["read_bytes_per_second"] == 2e9


def test_the_command_refuses_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(tmp_path / "absent")]) == 1
    assert "not an existing folder" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_told(
    nvme_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.parent.write_text("a file in the way")
    monkeypatch.setattr(tuning, "probe", result_for)
    assert cli.main(["tune", str(nvme_path)]) == 0
    assert "could not be saved" in capsys.readouterr().out
