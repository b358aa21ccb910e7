"""Saves or resumes once, in a process of its own: `python -m benchmarks.checkpoint_worker SPEC`.

SPEC is JSON: `does` (save or resume), `folder` of the checkpoints, `config`, `shape`. DeepSpeed's turn is
`rivals.deepspeed_checkpoint`; what both do is here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.loop import emit, peak_rss_bytes
from benchmarks.models import GPT, Samples
from benchmarks.shapes import Shape

TAG, STEPS = "step", 2


def act(spec: dict[str, Any], make: Callable[[Shape], Any], synchronize: Callable[[Any], None]) -> dict[str, Any]:
    """Save after a few steps, or resume and say what the loss is.

    Args:
        spec: see above.
        make: an engine from the shape of the model.
        synchronize: waits until the engine is at rest.

    Returns:
        `seconds` of the call, `durable_seconds` until all files are on the disk, `peak_rss_bytes` of the process so
        far, `loss` and `saved_loss` of the batch after the save.
    """
    shape, folder = Shape(**spec["shape"]), spec["folder"]
    engine = make(shape)
    samples = Samples(shape)
    probe = Samples(shape, seed=1).next()
    if spec["does"] == "resume":
        begin = time.perf_counter()
        _, client = engine.load_checkpoint(folder, tag=TAG)
        seconds = time.perf_counter() - begin
        peak = peak_rss_bytes()
        loss = _loss(engine, probe)
        return {"seconds": seconds, "peak_rss_bytes": peak, "loss": loss, "saved_loss": client["loss"]}
    for _ in range(STEPS):
        engine.backward(engine(samples.next()))
        engine.step()
    loss = _loss(engine, probe)
    synchronize(engine)
    os.sync()
    before = peak_rss_bytes()
    begin = time.perf_counter()
    engine.save_checkpoint(folder, tag=TAG, client_state={"loss": loss})
    seconds = time.perf_counter() - begin
    nbytes = sync_folder(Path(folder))
    durable = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "durable_seconds": durable,
        "bytes": nbytes,
        "rss_bytes_before": before,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def sync_folder(folder: Path) -> int:
    """Bring all that is in the folder to the disk; returns its bytes."""
    nbytes = 0
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            continue
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        nbytes += os.fstat(fd).st_size if path.is_file() else 0
        os.close(fd)
    return nbytes


def _loss(engine: Any, tokens: torch.Tensor) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(tokens.to(engine.device)))
    engine.train()
    return loss


def main() -> None:
    """Do what the specification says and print the figures."""
    import zero

    spec = json.loads(sys.argv[1])
    torch.manual_seed(0)

    def make(shape: Shape) -> Any:
        with zero.Init(config_dict_or_path=spec["config"]):
            model = GPT(shape)
        return zero.initialize(model=model, config=spec["config"])[0]

    result = act(spec, make, lambda engine: engine.synchronize())
    emit("done", **result, torch=torch.__version__)


if __name__ == "__main__":
    main()
