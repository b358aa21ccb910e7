"""Identifies the device of a folder: a measurement of its speed is valid for equal identities."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from native import build

SYSFS = Path("/sys/dev/block")
MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Equal for two folders when a measurement of one is valid for the other."""

    name: str  # Of the block device; without one, the mount's source ("overlay", "server:/export").
    model: str
    serial: str
    size_bytes: int
    file_system: str
    kernel: str
    engine: str  # Hash of the I/O engine's sources: a changed engine is measured again.

    @property
    def key(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.model, self.file_system)))


def identify(folder: Path) -> DeviceIdentity:
    """The device below `folder`. Unknown fields are empty or 0."""
    number = folder.stat().st_dev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    source, file_system = _mount_of(numbers)
    block = SYSFS / numbers
    name = block.resolve().name if block.exists() else source
    disk = block if (block / "queue").exists() else block.resolve().parent  # else a partition: its disk
    sectors = _text(block / "size")
    return DeviceIdentity(
        name=name,
        model=_text(disk / "device" / "model") or _text(disk / "loop" / "backing_file"),
        serial=_text(disk / "device" / "serial") or _text(disk / "serial"),
        size_bytes=int(sectors) * 512 if sectors.isdigit() else 0,
        file_system=file_system,
        kernel=os.uname().release,
        engine=_engine_hash(),
    )


def _mount_of(numbers: str) -> tuple[str, str]:
    """(source, file system) of the device with these numbers."""
    try:
        lines = MOUNTINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == numbers and len(after.split()) > 1:
            file_system, source = after.split()[:2]
            return source, file_system
    return "", ""


def _engine_hash() -> str:
    sources = dataclasses.replace(build.LIBZN, sources=("aio/*.c", "mem.c"), includes=("include/*.h", "aio/*.h"))
    return build.source_hash(sources)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
