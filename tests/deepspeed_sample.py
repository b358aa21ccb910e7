"""The model that both DeepSpeed and this project train in the tests of DeepSpeed's checkpoints; it imports neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

OPTIMIZER = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1}
NO_DECAY = {"weight_decay": 0.0, "lr": 0.02}
SCHEDULER = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}
CLIENT_STATE = {"epoch": 3, "best": 0.25, "seen": ["a", "b"], "generator": torch.arange(7, dtype=torch.uint8)}
CLIPPING = 0.5
VOCABULARY = 13


class Sample(nn.Module):
    """Odd sizes, a tied head, a frozen layer, a scalar, buffers of three kinds; `width` makes it larger."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.first = nn.Linear(width, 7)
        self.norm = nn.LayerNorm(7)
        self.base = nn.Linear(7, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(5, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of next-token prediction."""
        self.calls += 1
        hidden = self.norm(torch.tanh(self.first(self.embedding(tokens))))
        hidden = self.second(self.base(hidden) * self.scale + self.shift.to(hidden.dtype))
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(width: int = 6) -> Sample:
    """The model, with values that depend only on the width."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Sample(width)


def _plain(name: str) -> bool:
    return name.endswith("bias") or name.startswith(("norm", "scale"))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups; the second has no decay and another order."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    return [
        {"params": [value for name, value in named if not _plain(name)]},
        {"params": [value for name, value in reversed(named) if _plain(name)], **NO_DECAY},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens of one micro-batch."""
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
