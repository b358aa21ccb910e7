"""`zero doctor`: every question has an answer on every machine, and a fallback that is in use says what it costs."""

from __future__ import annotations

import json
import os
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from pretended import pretend_accelerator

from offload.kernels import kernels
from zero.tools import doctor_command
from zero.tools.cli import main
from zero.tools.doctor_command import MISSING, OK, SECTIONS, SLOWER, UNKNOWN, Fact, collect


def facts(*paths: Path, probe: bool = False) -> dict[str, Fact]:
    return {fact.name: fact for fact in collect(paths, probe=probe)}


@pytest.fixture
def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without O_DIRECT."""
    opened = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)


def test_every_section_is_answered_and_nothing_stays(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(nvme_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert tuple(told) == SECTIONS and all(told.values())
    assert {"name": "torch", "value": version("torch"), "verdict": OK, "note": ""} in told["software"]
    assert {entry["verdict"] for section in told.values() for entry in section} <= {OK, SLOWER, MISSING, UNKNOWN}
    assert list(nvme_path.iterdir()) == []
    assert main(["doctor", str(nvme_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line for line in table if line in SECTIONS] == list(SECTIONS)


def test_what_is_in_use_is_what_an_engine_would_use(nvme_path: Path) -> None:
    told = facts(nvme_path)
    assert kernels.isa() in told["kernels"].value or told["kernels"].verdict == SLOWER
    assert told["in use"].value == doctor_command.io_choice()[1]


def test_without_the_library_the_fallbacks_are_named_with_their_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_NATIVE", "0")
    told = facts(tmp_path)
    assert told["kernels"].verdict == SLOWER and "ZERO_NATIVE=0" in told["kernels"].note
    assert "twenty times" in told["kernels"].note
    assert told["in use"].verdict == SLOWER and told["in use"].value.startswith("aiofiles")
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert " ! kernels" in printed and " - kernels: disabled by ZERO_NATIVE=0" in printed


@pytest.mark.parametrize(("slowdown", "verdict"), [(12.0, SLOWER), (0.6, OK)])
def test_slow_bf16_matmuls_are_told(slowdown: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "bf16_slowdown", lambda device: slowdown)
    monkeypatch.setattr(doctor_command, "present_kind", lambda: None)
    fact = facts()["bf16 matmuls"]
    assert fact.verdict == verdict and ("fp32" in fact.note) is (verdict == SLOWER)


@pytest.mark.parametrize(
    ("name", "said", "verdict", "told"),
    [
        ("huge pages", "always madvise [never]", SLOWER, "about half as fast"),
        ("huge pages", "always [madvise] never", OK, ""),
    ],
)
def test_huge_pages(
    name: str, said: str, verdict: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text(said + "\n")
    monkeypatch.setattr(doctor_command, "HUGE_PAGES", tmp_path / "enabled")
    fact = facts()[name]
    assert fact.verdict == verdict and told in fact.note and fact.value == said


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "io_uring"])
def test_a_slower_way_to_move_bytes_says_why(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"{backend}: io_uring blocked; buffers are not registered (ENOMEM)"
    monkeypatch.setattr(doctor_command, "io_choice", lambda: (backend, reason))
    fact = facts()["in use"]
    assert fact.verdict == SLOWER and fact.value == reason and fact.note


def test_disks_that_cannot_serve_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none"
    told = facts(none, Path("/dev/shm"))
    assert told[str(none)].verdict == MISSING and "create" in told[str(none)].note
    (tmp_path / "file").write_text("")
    assert "is a file" in facts(tmp_path / "file")[str(tmp_path / "file")].note
    if Path("/dev/shm").is_dir():
        assert "host memory, not a disk" in told["/dev/shm"].note
    monkeypatch.setattr(doctor_command, "free_bytes", lambda path: 10**9)
    assert "12 bytes per parameter" in facts(tmp_path)[str(tmp_path)].note


def test_a_file_system_without_direct_io_is_told(tmp_path: Path, no_direct_io: None) -> None:
    fact = facts(tmp_path)[f"{tmp_path}: O_DIRECT"]
    assert fact.verdict == SLOWER and "page cache" in fact.note


def test_disks_are_measured_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def probe(folder: Path) -> Any:
        asked.append(folder)
        raise OSError("no measurement in this test")

    monkeypatch.setattr(doctor_command, "measure_disk", probe)
    assert "not measured" in facts(tmp_path)[f"{tmp_path}: speed"].value and not asked
    assert facts(tmp_path, probe=True)[f"{tmp_path}: speed"].verdict == UNKNOWN and asked == [tmp_path]


@pytest.mark.parametrize(
    ("address", "nodes", "verdict"), [("127.0.1.1", "2", SLOWER), ("127.0.1.1", "1", OK), ("10.0.0.7", "2", OK)]
)
def test_a_name_that_other_nodes_cannot_reach_is_told_where_there_are_some(
    address: str, nodes: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    monkeypatch.setattr(doctor_command, "DEFAULT_HOSTFILE", "/no/hostfile")
    monkeypatch.setenv("SLURM_NNODES", nodes)
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    fact = facts()["this host's name"]
    assert fact.verdict == verdict and ("GLOO_SOCKET_IFNAME" in fact.note) is (verdict == SLOWER)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert facts()["this host's name"].verdict == OK


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken\nprobe")


@pytest.mark.parametrize(
    ("place", "attribute"),
    [
        *((doctor_command, name) for name in ("library_trouble", "open_aio", "io_choice", "SharedHostMemory")),
        *((psutil, "virtual_memory"), (socket, "if_nameindex"), (socket, "gethostname"), (os, "sched_getaffinity")),
        *((doctor_command, "read_states"), (doctor_command, "identify"), (doctor_command, "free_bytes")),
        *(
            (doctor_command, "present_kind"),
            (doctor_command.dist, "is_gloo_available"),
            (doctor_command, "_direct_io_trouble"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failing_probe_is_a_line(
    place: Any, attribute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, attribute, failing)
    assert main(["doctor", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not known" in line]
    assert lines and all("(RuntimeError: broken probe)" in line and line.startswith(" ?") for line in lines)


def test_a_gpu_is_listed_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(
        monkeypatch,
        device_count=lambda: 1,
        mem_get_info=lambda index: (6 * 10**9, 8 * 10**9),
        get_device_name=lambda index: "a GPU",
    )
    monkeypatch.setattr(doctor_command, "library_trouble", lambda *, on_gpu: "libzn_cuda.so was not built")
    monkeypatch.setattr(doctor_command, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor_command, "pin", lambda data: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    told = facts()
    assert told["GPU 0"].value == "a GPU, 8.00 GB, 6.00 GB free" and told["CUDA_VISIBLE_DEVICES"].value == "'3'"
    assert told["CUDA kernels"].verdict == SLOWER and "was not built" in told["CUDA kernels"].note
    assert told["pinned memory"].verdict == SLOWER
