"""What the tests of snapshots share: runs that are cut off, disks that are looked at from outside."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import ADAMW, build, make_config, tokens, trainability
from probe import put_disk_everywhere, storage_of
from reference import Hyper, Reference, differences, snapshot
from torch import Tensor

HYPER = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
SIZES = {"middle": {"vocab": 512}}


def config_of(
    nvme_path: Path | str, every: int = 1, pair: tuple[str, str] = ("nvme", "nvme"), **more: Any
) -> dict[str, Any]:
    """A config with snapshots."""
    zero = {**more.pop("zero", {}), "offload_optimizer": {"snapshot": {"every": every}}}
    return make_config(pair, nvme_path, zero=zero, **more)


def micro_batch(trainer: Any, index: int, model: str = "gpt") -> None:
    trainer.backward(trainer(tokens(index, **{k: v for k, v in SIZES.get(model, {}).items() if k == "vocab"})))
    trainer.step()


def train(trainer: Any, *indices: int, model: str = "gpt") -> Any:
    for index in indices:
        micro_batch(trainer, index, model)
    return trainer


def values(trainer: Any, model: str = "gpt") -> dict[str, Tensor]:
    return snapshot(trainer, trainability(build(model)))


def unequal(ours: Any, theirs: Any, model: str = "gpt") -> list[str]:
    return differences(values(ours, model), values(theirs, model))


def reference_of(engine: Any, model: str = "gpt", **more: Any) -> Reference:
    return Reference(build(model), lambda name: HYPER, **more)


def as_a_kill_would_leave_it(nvme_path: Path, elsewhere: Path) -> Path:
    """A copy of the folder as it is this moment, for a job that comes after."""
    shutil.copytree(nvme_path, elsewhere, dirs_exist_ok=True)
    return elsewhere


def folder(nvme_path: Path | str, name: str = "default") -> Path:
    return Path(nvme_path) / "zero-snapshots" / name


def committed(nvme_path: Path | str, rank: int = 0) -> dict[str, Any] | None:
    """The manifest that counts, as the files say; not as the engine thinks."""
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
    """[begin, end) of each slot that the committed manifest names, in the swap space."""
    manifest = committed(nvme_path, rank)
    if manifest is None:
        return
    for plane, slots in zip(storage_of(engine).twice, manifest["slots"], strict=True):
        for pair, slot in zip(plane.pairs, slots, strict=True):
            begin = pair.offsets[int(slot)]
            yield begin, begin + plane.nbytes_of(pair)


def named_bytes(engine: Any, nvme_path: Path | str, rank: int = 0) -> str:
    """A digest of what lies in those slots."""
    digest = hashlib.sha256()
    with (folder(nvme_path) / f"rank-{rank}" / "swap").open("rb") as file:
        for begin, end in named_ranges(engine, nvme_path, rank):
            file.seek(begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


class WatchedDisk:
    """Refuses, for a test, a write to what the committed manifest names at that moment."""

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
        """The engine's disk, whose writes come here."""
        disk = self._disk

        class Disk(type(disk)):  # type: ignore[misc]
            __slots__ = ()
            write = staticmethod(self.write)

        return Disk(disk.aio, disk.swap, disk.traffic)


def allocated_bytes(nvme_path: Path | str) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in Path(nvme_path).rglob("*") if path.is_file())
