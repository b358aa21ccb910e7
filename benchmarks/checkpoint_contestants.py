"""Who saves and loads in the checkpoint question: our engine in this process, workers, and the yardstick."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import zero
from benchmarks.common import RivalMissing, run_child
from benchmarks.contestants import our_config
from benchmarks.models import GPT, Samples
from benchmarks.rivals import fio
from benchmarks.shapes import SHAPES
from benchmarks.swap import RECORDS_IN_FLIGHT, Swapper
from offload.aio import AioOptions
from offload.sizes import align_up

RECORD_BYTES = 16 << 20
TAG = "step"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Folder:
    """A temporary folder on the disk in question."""

    def __init__(self, on: Path) -> None:
        self._on = on

    def __enter__(self) -> Path:
        """Make it."""
        self._path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self._on)).resolve()
        return self._path

    def __exit__(self, *exception: object) -> None:
        """Remove it."""
        shutil.rmtree(self._path, ignore_errors=True)


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
        self._folder = folder / "saved"
        self.steps(2)

    def steps(self, count: int) -> None:
        """So many steps, to their very end."""
        for _ in range(count):
            self._step()
        self._engine.synchronize()

    def save(self) -> dict[str, Any]:
        """To a folder of its own; what was saved before is removed, and that is not timed."""
        self._clean()
        begin = time.perf_counter()
        self._engine.save_checkpoint(self._folder, tag=TAG)
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
        self._clean()
        begin = time.perf_counter()
        self._engine.save_checkpoint(self._folder, tag=TAG)
        blocked, steps = time.perf_counter() - begin, 0
        while steps == 0 or self._engine.checkpoint_pending():
            self._step()
            steps += 1
        self._engine.wait_for_checkpoint()
        self._engine.synchronize()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "blocked_seconds": blocked, "steps": steps, "bytes": self.checkpoint_bytes()}

    def checkpoint_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in (self._folder / TAG).iterdir())

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

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.sync()


class YardStick:
    """Writes and reads of so many bytes on the disk: by tuned fio, or by our own I/O engine where there is no fio.

    Attributes:
        what: who it is.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        record = min(RECORD_BYTES, align_up(nbytes // RECORDS_IN_FLIGHT, 4096))
        self._nbytes, self._options = align_up(nbytes, record), AioOptions()
        self._swapper = Swapper(folder, self._nbytes, record, self._options)
        self.what = "fio" if fio.version() is not None else "our own I/O engine, as fio is not installed"

    def run(self, kind: str) -> dict[str, Any]:
        """All of the bytes once: `kind` is "read", "write" or "mixed"."""
        if fio.version() is None:
            begin = time.perf_counter()
            getattr(self._swapper, kind)(self._nbytes)
            return {"seconds": time.perf_counter() - begin}
        chunk, depth = self._options.chunk_bytes, self._options.queue_depth
        return fio.run(kind, self._swapper.path, self._nbytes, chunk, depth, self._swapper.backend)

    def __enter__(self) -> YardStick:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the file."""
        self._swapper.close()


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


def check_loaded(who: str, figures: Mapping[str, Any]) -> None:
    """Raise RivalMissing when what was resumed is not what was saved."""
    if figures["loss"] != figures["saved_loss"]:
        raise RivalMissing(f"{who} resumed with loss {figures['loss']}, it was saved with {figures['saved_loss']}")
