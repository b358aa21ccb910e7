"""What the GPU questions share: a model whose blocks are recomputed, quick initial values, figures of the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.models import GPT
from benchmarks.shapes import Shape

NO_GPU = 2
"""Exit status on a machine without one."""
NOISE_NUMEL = 1 << 20
SHAPES = {
    "tiny": Shape(layers=2, width=128, vocabulary=256, sequence=16),
    "1B": Shape(layers=16, width=2048, vocabulary=32768, sequence=2048),
    "7B": Shape(layers=34, width=4096, vocabulary=32768, sequence=2048),
}


def require_gpu() -> torch.device:
    """The GPU; ends the program with status 2 where there is none."""
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False here, so there is nothing to measure", file=sys.stderr)
        raise SystemExit(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


class RecomputingGPT(GPT):
    """As `GPT`; each block's activations are made again in backward, as one trains models that do not fit."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) of int64."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


def fill_with_noise(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Small normal values that repeat; for billions of elements torch's generators take minutes."""
    with torch.no_grad():
        noise = torch.randn(NOISE_NUMEL, generator=torch.Generator().manual_seed(0)).mul_(0.02)
        flat = tensor.detach().view(-1)
        for begin in range(0, flat.numel(), NOISE_NUMEL):
            part = flat[begin : begin + NOISE_NUMEL]
            part.copy_(noise[: part.numel()])
    return tensor


@contextmanager
def quick_initialisation() -> Iterator[None]:
    """Modules made inside get noise from `fill_with_noise` instead of torch's random values."""
    with (
        mock.patch("torch.nn.init.kaiming_uniform_", fill_with_noise),
        mock.patch("torch.nn.init.uniform_", fill_with_noise),
        mock.patch("torch.nn.init.normal_", fill_with_noise),
    ):
        yield


def device_figures() -> dict[str, int]:
    """Peaks of torch's allocator since the process began; zeros without a GPU."""
    if not torch.cuda.is_available():
        return {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0, "allocations": 0}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocations": int(torch.cuda.memory_stats().get("num_device_alloc", 0)),
    }
