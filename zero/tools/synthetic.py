"""A GPT with no text: for looking at what the engine does, not at what a model learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.errors import ConfigError

HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. `hidden` is a multiple of 64, the width of a head, or smaller than it."""

    layers: int
    hidden: int
    vocabulary: int
    sequence: int

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.vocabulary, self.sequence - 1) < 1:
            raise ConfigError(f"synthetic model: sizes must be positive and the sequence at least 2, got {self}")
        if self.hidden > HEAD_WIDTH and self.hidden % HEAD_WIDTH:
            raise ConfigError(f"synthetic model: hidden must be a multiple of {HEAD_WIDTH}, got {self.hidden}")


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP; input and output are (batch, time, hidden)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(hidden // HEAD_WIDTH, 1)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return grown


class SyntheticGPT(nn.Module):
    """Next-token prediction; a call with tokens, int64 (batch, time), returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(shape.hidden) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


def random_tokens(shape: Shape, batch: int, seed: int) -> Tensor:
    """int64 (batch, shape.sequence)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocabulary, (batch, shape.sequence), generator=generator)
