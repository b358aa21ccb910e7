"""Common code of the snapshot tests: interrupted runs, and disks that are checked from outside."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import make_config, tokens
from probe import put_disk_everywhere, storage_of
from torch import Tensor


def config_of(
    nvme_path: Path | str, every: int = 1, pair: tuple[str, str] = ("nvme", "nvme"), **more: Any
) -> dict[str, Any]:
    """A config with snapshots."""
    zero = {**more.pop("zero", {}), "offload_optimizer": {"snapshot": {"every": every}}}
    return make_config(pair, nvme_path, zero=zero, **more)


def on_middle(trainer: Any, index: int) -> Tensor:
    """A loss of the model "middle", whose vocabulary is larger."""
    loss: Tensor = trainer(tokens(index, vocab=512))
    return loss


def as_a_kill_would_leave_it(nvme_path: Path, elsewhere: Path) -> Path:
    """A copy of the folder in its present state, for a later job."""
    shutil.copytree(nvme_path, elsewhere, dirs_exist_ok=True)
    return elsewhere


def folder(nvme_path: Path | str, name: str = "default") -> Path:
    return Path(nvme_path) / "zero-snapshots" / name


def committed(nvme_path: Path | str, rank: int = 0) -> dict[str, Any] | None:
    """The committed manifest, read from the files, not from the engine."""
    head = folder(nvme_path) / "committed"
    if not head.exists():
        return None
    copies = [json.loads(line) for line in head.read_bytes().replace(b"\0", b"\n").split(b"\n") if line[:1] == b"{"]
    number = max(copy["number"] for copy in copies)
    path = folder(nvme_path) / f"rank-{rank}" / f"manifest-{number % 2}"
    found: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    assert found["number"] == number
    return found


def named_ranges(engine: Any, nvme_path: Path | str, rank: int = 0) -> Iterator[tuple[int, int]]:
    """[begin, end) in the swap space of each slot that the committed manifest names."""
    manifest = committed(nvme_path, rank)
    if manifest is None:
        return
    for plane, slots in zip(storage_of(engine).snapshot_arrays, manifest["slots"], strict=True):
        for pair, slot in zip(plane.pairs, slots, strict=True):
            begin = pair.offsets[int(slot)]
            yield begin, begin + plane.nbytes_of(pair)


def named_bytes(engine: Any, nvme_path: Path | str, rank: int = 0) -> str:
    """A digest of the bytes in those slots."""
    digest = hashlib.sha256()
    with (folder(nvme_path) / f"rank-{rank}" / "swap").open("rb") as file:
        for begin, end in named_ranges(engine, nvme_path, rank):
            file.seek(begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


class WatchedDisk:
    """Fails the test on a write to a slot that the committed manifest names at that moment."""

    def __init__(self, engine: Any, nvme_path: Path | str, rank: int = 0) -> None:
        self._engine, self._path, self._rank = engine, nvme_path, rank
        self._disk = storage_of(engine).disk
        self.writes, self.strict = 0, True
        put_disk_everywhere(engine, self._beside())

    async def write(self, offset: int, buffer: Tensor, what: str = "write") -> None:
        self.writes += 1
        for begin, end in named_ranges(self._engine, self._path, self._rank):
            if self.strict and begin < offset + buffer.numel() and offset < end:
                raise AssertionError(f"{what}: wrote [{offset}, {offset + buffer.numel()}), named is [{begin}, {end})")
        await self._disk.write(offset, buffer, what)

    def _beside(self) -> Any:
        """The engine's disk, with writes redirected to this object."""
        disk = self._disk

        class Disk(type(disk)):  # type: ignore[misc]
            __slots__ = ()
            write = staticmethod(self.write)

        return Disk(disk.aio, disk.swap, disk.traffic)


def allocated_bytes(nvme_path: Path | str) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in Path(nvme_path).rglob("*") if path.is_file())
