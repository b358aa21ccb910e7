"""Names the device of a folder, for reports."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/dev/block")
MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    name: str  # Of the block device; without one, the mount's source ("overlay", "server:/export").
    model: str
    file_system: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.model, self.file_system)))


def identify(folder: Path) -> DeviceIdentity:
    """The device below `folder`. Unknown fields are empty."""
    number = folder.stat().st_dev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    source, file_system = _mount_of(numbers)
    block = SYSFS / numbers
    name = block.resolve().name if block.exists() else source
    disk = block if (block / "queue").exists() else block.resolve().parent  # else a partition: its disk
    return DeviceIdentity(name, _text(disk / "device" / "model") or _text(disk / "loop" / "backing_file"), file_system)


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
