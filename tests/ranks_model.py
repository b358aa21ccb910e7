"""A model that differs between ranks: a rank may use modules that another does not use, and some are never used.

Sizes are no round numbers, and a block's elements are in the slices of four ranks. Eight units: tied embedding and
head, a frozen Linear, two blocks with a parameter that only some data use, a block that only ranks with an odd number
call, an unused Linear and an unused bare parameter, a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from models import freeze, seeded
from torch import Tensor, nn

VOCAB, WIDTH, HIDDEN, TOKENS, SAMPLES = 229, 37, 211, 7, 3
LIVE_NUMEL = 66_000
"""A live limit with which every module below the root is a separate unit."""


@dataclass(frozen=True)
class Batch:
    """The batch of one rank; `kind` decides which modules run."""

    tokens: Tensor
    """Samples x TOKENS, int64."""
    kind: int


def batch(index: int, rank: int, *, samples: int = SAMPLES, agreed: bool = False) -> Batch:
    """Micro-batch number `index` of a rank; `agreed`: all ranks call the same modules with it."""
    generator = torch.Generator().manual_seed(7_919 * index + rank)
    tokens = (torch.rand(samples, TOKENS, generator=generator).square() * VOCAB).long()
    return Batch(tokens, (index if agreed else rank) % 2)


class Moody(nn.Module):
    """A block whose parameter `bump` is used only with `moody`: on some ranks in some steps."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.bump = nn.Parameter(0.1 * torch.randn(hidden))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, moody: bool = True) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden * self.bump if moody else hidden)


class Motley(nn.Module):
    """See the docstring of this file. Returns the next-token loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Moody(WIDTH, HIDDEN) for _ in range(2))
        self.odd = Moody(WIDTH, HIDDEN - 2)
        self.unused = nn.Linear(WIDTH, 11)
        self.spare = nn.Parameter(torch.randn(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        freeze(self.frozen)

    def forward(self, batch: Batch) -> Tensor:
        x = self.table(batch.tokens)
        x = x + self.frozen(x)
        for index, block in enumerate(self.blocks):
            x = block(x, bool(batch.tokens.sum() >> index & 1))
        if batch.kind:
            x = self.odd(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.tokens[:, 1:].flatten())


def motley(seed: int = 0) -> Motley:
    """A model whose weights depend only on the seed."""
    with seeded(seed):
        return Motley()
