"""Jobs that take snapshots; they are run in separate processes and killed there."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import build, make_config, tokens
from probe import units_read_once
from ranks import RankError, RankPool
from torch import nn

SECONDS_MAX = 90.0


class Noisy(nn.Module):
    """A model whose result depends on random numbers and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = build("gpt")
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(float(x.float().mean()))
        noise = self.drop(torch.ones(16)).mean() + random.random() + float(np.random.rand())
        return self.gpt(x) * noise + 0.0 * self.seen.clone()


def config(nvme_path: str, every: int, pair: tuple[str, str], threshold: int, **more: Any) -> dict[str, Any]:
    zero = {
        "offload_optimizer": {"snapshot": {"every": every}},
        "stage3_param_persistence_threshold": threshold,
        **more,
    }
    return make_config(pair, nvme_path, clipping=1.0, zero=zero)


def job(made: dict[str, Any], steps: int, progress: str) -> tuple[int | None, int, str]:
    """Train up to `steps` steps, from a snapshot if there is one; (step of the snapshot, steps, digest)."""
    import torch.distributed as dist

    import zero

    torch.set_num_threads(1)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
    engine = zero.initialize(
        model=Noisy(),
        config=made,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done)),
    )[0]
    with engine:
        named = "snapshot" in made["zero_optimization"]["offload_optimizer"]
        loaded = engine.load_snapshot() if named else None
        while engine.global_steps < steps:
            engine.backward(engine(tokens(engine.global_steps * ranks + rank)))
            engine.step()
            if rank == 0:
                with Path(progress).open("a") as file:
                    file.write(".")
        return loaded, engine.global_steps, digest_of(engine)


def digest_of(engine: Any) -> str:
    digest = hashlib.sha256()
    with units_read_once(engine):
        for name, _ in Noisy().named_parameters():
            state = engine.full_state(name)
            for value in (engine.full_master(name), state["exp_avg"], state["exp_avg_sq"], torch.tensor(state["step"])):
                digest.update(name.encode() + value.contiguous().numpy().tobytes())
    digest.update(engine.module.seen.float().numpy().tobytes() + torch.rand(2).numpy().tobytes())
    digest.update(f"{random.random()} {np.random.rand()} {engine.get_lr()}".encode())
    return digest.hexdigest()


def killed_after(
    pool: RankPool, done: int, seconds: float, made: dict[str, Any], steps: int, progress: Path
) -> list[Any] | None:
    """Run `job`, and kill its processes `seconds` after the first has made `done` steps; None if it was killed."""
    progress.write_text("")
    ended = threading.Event()

    def kill() -> None:
        end = time.monotonic() + SECONDS_MAX
        while progress.stat().st_size < done and time.monotonic() < end and not ended.is_set():
            time.sleep(0.002)
        if not ended.wait(seconds):
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        results = pool.run(job, made, steps, str(progress), errors="return", timeout_seconds=SECONDS_MAX)
    finally:
        ended.set()
        killer.join()
    if any(isinstance(result, RankError) for result in results):
        pool.restart()
        return None
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
