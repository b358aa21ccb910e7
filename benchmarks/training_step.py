"""What does a training step of a 336 M-parameter GPT cost on each pair of tiers, and what is its floor?

16 layers, hidden 1280, vocabulary 8192, batch 2 x 64 tokens, bf16, AdamW, clipping. Floor on NVMe:
forward and backward of plain torch, plus 12 bytes per parameter read and 12 written by the step.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero
from benchmarks.common import report


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return grown


class GPT(nn.Module):
    """The model of the question."""

    def __init__(self, width: int = 1280, layers: int = 16, vocabulary: int = 8192, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 20) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="folder on the disk in question")
    parser.add_argument("--param", choices=["none", "cpu", "nvme"], default="nvme")
    parser.add_argument("--optimizer", choices=["none", "cpu", "nvme"], default="nvme")
    parser.add_argument("--host-budget", default=None)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    budget = {} if options.host_budget is None else {"memory_budget": {"host": options.host_budget}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": options.param, "nvme_path": options.path},
            "offload_optimizer": {"device": options.optimizer, "nvme_path": options.path},
            "stage3_param_persistence_threshold": 0,
        },
        **budget,
    }
    with zero.Init(config_dict_or_path=config):
        model = GPT()
    generator = torch.Generator().manual_seed(0)
    with zero.initialize(model=model, config=config)[0] as engine:
        seconds = []
        for number in range(options.steps):
            tokens = torch.randint(0, 8192, (2, 64), generator=generator).to(engine.device)
            if number == 1:
                before = engine.statistics()
            begin = time.perf_counter()
            engine.backward(engine(tokens))
            engine.step()
            seconds.append(time.perf_counter() - begin)
        after = engine.statistics()
        steps = options.steps - 1
        report(
            "what does a step cost?",
            f"param {options.param}, optimizer {options.optimizer}",
            seconds[1:],
            forward_ms=round((after.forward_seconds - before.forward_seconds) / steps * 1e3),
            backward_ms=round((after.backward_seconds - before.backward_seconds) / steps * 1e3),
            optimizer_ms=round((after.optimizer_seconds - before.optimizer_seconds) / steps * 1e3),
            exposed_ms=round((after.exposed_wait_seconds - before.exposed_wait_seconds) / steps * 1e3),
            read_GB=round((after.nvme_read_bytes - before.nvme_read_bytes) / steps / 1e9, 3),
            written_GB=round((after.nvme_write_bytes - before.nvme_write_bytes) / steps / 1e9, 3),
            peak_rss_MB=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
            backend=after.aio_backend,
        )


if __name__ == "__main__":
    main()
