"""Updates run behind the step: nobody can tell, but for the time and the bytes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from models import build, make_config, tokens
from recovery import NVME, Open, once_more, reference_of, train, unequal
from torch import Tensor

from offload.errors import StorageError

# ---- results that are stored while the model uses them --------------------------------------------------------------


class LateDisk:
    """The disk of one plane; while `failing`, a write takes a moment and then fails."""

    def __init__(self, plane: Any) -> None:
        self._disk, self.failing, self.failed = plane._disk, False, 0
        plane._disk = self

    async def read(self, offset: int, buffer: Tensor, what: str = "") -> None:
        await self._disk.read(offset, buffer, what)

    async def write(self, offset: int, buffer: Tensor, what: str = "") -> None:
        if self.failing:
            await asyncio.sleep(0.1)
            self.failed += 1
            raise StorageError("write", errno=5, path="weights", offset=offset, free_bytes=None)
        await self._disk.write(offset, buffer, what)


def test_weights_that_cannot_be_stored_while_forward_uses_them_are_kept(open_engine: Open, nvme_path: Path) -> None:
    """The update writes from the memory that the unit is bound to; what it keeps must be the weights."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = train(reference_of(engine), 0, 1)
    (plane,) = engine._storage.weights
    disk = LateDisk(plane)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    disk.failing = True
    engine.step()
    # The first block is in use until the write of its weights has failed.
    handle = engine.module.blocks[0].up.register_forward_pre_hook(lambda module, args: time.sleep(0.4))
    with pytest.raises(StorageError, match="update of step 2: "):
        engine(tokens(2))
        engine.synchronize()
    handle.remove()
    assert disk.failed
    disk.failing = False
    once_more(engine.synchronize)
    assert unequal(engine, reference) == []
