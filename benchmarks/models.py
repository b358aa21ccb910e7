"""The GPT that every contestant trains: plain PyTorch, nothing in it knows where its weights live."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import HEAD_NUMEL, Shape


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, width // HEAD_NUMEL, HEAD_NUMEL)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return grown


class GPT(nn.Module):
    """Next-token prediction; calling it gives the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) of int64."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


class Samples:
    """Random tokens, the same sequence of batches for every contestant; each rank has `seed`s of its own."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self._shape, self._device = shape, device
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """(batch, sequence) of int64."""
        size = (self._shape.batch, self._shape.sequence)
        return torch.randint(0, self._shape.vocabulary, size, generator=self._generator).to(self._device)
