"""Who saves and loads in the checkpoint question: our engine in this process, workers, and the yardstick."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import zero
from benchmarks.common import RivalMissing, run_child, write_incompressible
from benchmarks.contestants import our_config
from benchmarks.models import GPT, Samples
from benchmarks.rivals import fio
from benchmarks.shapes import SHAPES
from offload.io.aio import AioOptions, open_aio
from offload.memory.host_memory import map_host, tensor_over
from offload.sizes import PAGE_BYTES, align_up

LANES, LANE_BYTES = 4, 16 << 20
"""What our I/O engine moves at once where it stands for fio."""
ROOM_BYTES = 16 << 30
"""What is to be free before a file is written."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Folder:
    """A temporary folder on the disk in question."""

    def __init__(self, parent: Path) -> None:
        self._on = parent

    def __enter__(self) -> Path:
        """Make it."""
        self._path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self._on)).resolve()
        return self._path

    def __exit__(self, *exception: object) -> None:
        """Remove it."""
        shutil.rmtree(self._path, ignore_errors=True)


def keep_or_clear(folder: Path) -> None:
    """Leave what is there as it is, unless the disk gets full.

    A file system that is mounted with `discard` tells the disk of a removed file later, beside whatever is measured
    then; and what is written where something was discarded is slower for whoever comes first.
    """
    if folder.exists() and shutil.disk_usage(folder).free < ROOM_BYTES:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()


def drop_page_cache() -> bool:
    """Everything on the disk and nothing of it in memory; False where that is not allowed."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


class OurEngine:
    """An engine that has taken a step, so that there are moments, and its checkpoints in a folder."""

    def __init__(self, shape: str, tier: str, folder: Path, *, asynchronous: bool = False) -> None:
        config = engine_config(tier, folder, shape)
        if asynchronous:
            config["checkpoint"] = {"async_save": True}
        with zero.Init(config_dict_or_path=config):
            model = GPT(SHAPES[shape])
        self._engine: Any = zero.initialize(model=model, config=config)[0]
        self._samples = Samples(SHAPES[shape], self._engine.device)
        self._folder, self._saves = folder / "saved", 0
        self.steps(2)

    def steps(self, count: int) -> None:
        """So many steps, to their very end."""
        for _ in range(count):
            self._step()
        self._engine.synchronize()

    def save(self) -> dict[str, Any]:
        """To a folder of its own."""
        tag = self._next_tag()
        begin = time.perf_counter()
        self._engine.save_checkpoint(self._folder, tag=tag)
        return {"seconds": time.perf_counter() - begin}

    def load(self) -> dict[str, Any]:
        """What was saved last."""
        begin = time.perf_counter()
        self._engine.load_checkpoint(self._folder)
        return {"seconds": time.perf_counter() - begin}

    def can_save_behind(self) -> bool:
        """True when saves can go on behind the steps."""
        return hasattr(self._engine, "checkpoint_pending")

    def save_behind(self) -> dict[str, Any]:
        """A save and steps until it is on the disk."""
        tag = self._next_tag()
        begin = time.perf_counter()
        self._engine.save_checkpoint(self._folder, tag=tag)
        blocked, steps = time.perf_counter() - begin, 0
        while steps == 0 or self._engine.checkpoint_pending():
            self._step()
            steps += 1
        self._engine.wait_for_checkpoint()
        self._engine.synchronize()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "blocked_seconds": blocked, "steps": steps, "bytes": self.checkpoint_bytes()}

    def data_file(self) -> Path:
        """The largest file of what was saved last: nearly all of it."""
        return max((self._folder / self._tag()).iterdir(), key=lambda file: file.stat().st_size)

    def checkpoint_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in (self._folder / self._tag()).iterdir())

    def __enter__(self) -> OurEngine:
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._engine.close()

    def _step(self) -> None:
        self._engine.backward(self._engine(self._samples.next()))
        self._engine.step()

    def _tag(self) -> str:
        """Of what was saved last."""
        return f"step-{self._saves}"

    def _next_tag(self) -> str:
        keep_or_clear(self._folder)
        self._saves += 1
        return self._tag()


class YardStick:
    """The disk's own speed for so many bytes: tuned fio, or our own I/O engine where there is no fio.

    Attributes:
        what: who it is.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder, self._nbytes, self._options = folder, align_up(nbytes, PAGE_BYTES), AioOptions()
        self._aio = open_aio(self._options)
        self.what = "fio" if fio.version() is not None else "our own I/O engine, as fio is not installed"

    def write(self) -> dict[str, Any]:
        """To a new file whose room is reserved, as a checkpoint is."""
        folder = self._folder / "new"
        folder.mkdir(exist_ok=True)
        keep_or_clear(folder)
        path = folder / str(len(os.listdir(folder)))
        fd = self._open(path, os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, self._nbytes)
            figures = self._run("write", path)
            begin = time.perf_counter()
            os.fsync(fd)  # fio leaves in the drive's cache what a checkpoint does not
            return {**figures, "synced_seconds": figures["seconds"] + time.perf_counter() - begin}
        finally:
            os.close(fd)

    def over(self, kind: str) -> dict[str, Any]:
        """As "write", "read" or "mixed", of a file that has been written before."""
        path = self._folder / "old"
        if not path.exists():
            fd = self._open(path, os.O_CREAT)
            write_incompressible(fd, self._nbytes)
            os.close(fd)
        return self._run(kind, path)

    def read(self, path: Path) -> dict[str, Any]:
        """The first bytes of a file that somebody else has written."""
        return self._run("read", path)

    def _open(self, path: Path, flags: int = 0) -> int:
        return os.open(path, os.O_RDWR | os.O_DIRECT | flags, 0o600)

    def _run(self, kind: str, path: Path) -> dict[str, Any]:
        nbytes = min(self._nbytes, path.stat().st_size)
        if fio.version() is not None:
            chunk_bytes = min(self._options.chunk_bytes, nbytes)
            figures = fio.run(kind, str(path), nbytes, chunk_bytes, self._options.queue_depth, self._aio.backend)
            # It leaves out what is no whole block at the end.
            return {
                **figures,
                "seconds": figures["seconds"] * nbytes / (figures["read_bytes"] + figures["write_bytes"]),
            }
        fd, memory = self._open(path), tensor_over(map_host(LANES * LANE_BYTES)).random_()
        try:
            begin = time.perf_counter()
            whole_bytes = nbytes // PAGE_BYTES * PAGE_BYTES  # the kernel takes whole blocks; fio leaves the rest out
            asyncio.run(self._move(kind, fd, memory.split(LANE_BYTES), whole_bytes))
            return {"seconds": (time.perf_counter() - begin) * nbytes / max(whole_bytes, 1)}
        finally:
            os.close(fd)

    async def _move(self, kind: str, fd: int, buffers: Sequence[torch.Tensor], nbytes: int) -> None:
        async def move_lane(number: int) -> None:
            is_read = kind == "read" or (kind == "mixed" and number % 2 == 0)
            for offset in range(number * LANE_BYTES, nbytes, LANES * LANE_BYTES):
                part = buffers[number][: min(LANE_BYTES, nbytes - offset)]
                await (self._aio.read if is_read else self._aio.write)(fd, offset, part, "yardstick", "yardstick")

        await asyncio.gather(*(move_lane(number) for number in range(LANES)))

    def __enter__(self) -> YardStick:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove its files: nothing is measured any more."""
        self._aio.close()
        shutil.rmtree(self._folder / "new", ignore_errors=True)
        (self._folder / "old").unlink(missing_ok=True)


def engine_config(tier: str, folder: Path | str, shape: str) -> dict[str, Any]:
    """The JSON of the training questions, the optimizer's folder being in `folder`; "none": nothing is offloaded."""
    config = our_config(tier, folder, SHAPES[shape])
    if tier == "none":
        for block in ("offload_param", "offload_optimizer"):
            config["zero_optimization"].pop(block)
    return config


def run_worker(
    who: str, shape: str, tier: str, does: str, folder: Path, config: Mapping[str, Any] | None, lock: str | None
) -> dict[str, Any]:
    """A process that saves into `folder` or resumes from it.

    Raises:
        RivalMissing: it failed.
    """
    module = "benchmarks.checkpoint_worker" if who == "ours" else "benchmarks.rivals.deepspeed_checkpoint"
    if does == "save":
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / "saved")
    spec = {
        "shape": asdict(SHAPES[shape]),
        "does": does,
        "folder": str(folder / "saved"),
        "config": config or engine_config(tier, folder, shape),
    }
    figures = run_child(["-m", module, json.dumps(spec)], prefix=() if lock is None else ("flock", lock))
    figures.pop("event", None)
    return figures


def check_loaded(name: str, figures: Mapping[str, Any]) -> None:
    """Raise RivalMissing when what was resumed is not what was saved."""
    if figures["loss"] != figures["saved_loss"]:
        raise RivalMissing(f"{name} resumed with loss {figures['loss']}, it was saved with {figures['saved_loss']}")
