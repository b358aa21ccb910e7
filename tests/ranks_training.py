"""A small training that any number of ranks can run, with any launcher."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import GPT, make_config, seeded, tokens

import zero


def steps(nvme_path: str) -> Iterator[tuple[Any, float]]:
    """Yields the engine and this rank's loss after each step, endlessly; weights and states are on NVMe."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    with seeded(7):
        model = GPT(blocks=2)
    engine = zero.initialize(model=model, config=make_config(("nvme", "nvme"), nvme_path, clipping=1.0))[0]
    step = 0
    with engine:
        while True:
            loss = engine(tokens(step * dist.get_world_size() + rank))
            engine.backward(loss)
            engine.step()
            step += 1
            yield engine, float(loss.detach())


def train(nvme_path: str, count: int = 3) -> dict[str, Any]:
    """Losses of this rank, the last gradient norm, and a digest of all weights after `count` steps."""
    training, losses = steps(nvme_path), []
    for _ in range(count):
        engine, loss = next(training)
        losses.append(loss)
    digest = hashlib.sha256()
    for name, value in engine.named_full_parameters():
        digest.update(name.encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    norm = float(engine.get_global_grad_norm())
    training.close()
    return {"losses": losses, "norm": norm, "weights": digest.hexdigest(), "host": os.environ.get("CROSS_RANK")}
