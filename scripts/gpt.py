"""A byte-level GPT in plain PyTorch: nothing in this file knows where its weights live."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
WINDOW = 4
"""A position's input is the sum of embeddings of its last so many bytes: context before attention has learnt any."""
HEAD_WIDTH = 64
HEAD_GAIN = 4.0
"""Start of the last norm's gain: the head then learns as fast as the blocks at one learning rate."""
WIDTH_PER_LAYER = 256
"""Preferred width / layers. Wide and shallow learns most in a few minutes on a few cores."""


@dataclass(frozen=True)
class Shape:
    """What decides the number of parameters."""

    layers: int
    width: int
    sequence: int

    @property
    def numel(self) -> int:
        """Parameters of a GPT of this shape [elements]."""
        block = 12 * self.width**2 + 4 * self.width
        return self.layers * block + ((WINDOW + 1) * VOCABULARY + self.sequence + 2) * self.width


def shape_for(numel: int, sequence: int) -> Shape:
    """The shape nearest to the preferred proportions whose parameter count is within 4 % of `numel`.

    Where none is that near (tiny models), the nearest count wins.
    """

    def distance(shape: Shape) -> tuple[float, float]:
        miss = abs(shape.numel / numel - 1)
        proportion = abs(math.log(shape.width / shape.layers / WIDTH_PER_LAYER))
        return max(miss, 0.04), proportion

    shapes = []
    for layers in range(1, 129):
        # The positive root of 12 L w^2 + (vocabulary terms) w = numel, rounded to whole heads.
        linear = (WINDOW + 1) * VOCABULARY + sequence
        root = (math.sqrt(linear**2 + 48 * layers * numel) - linear) / (24 * layers)
        width = max(round(root / HEAD_WIDTH), 1) * HEAD_WIDTH
        shapes.append(Shape(layers, width, sequence))
    return min(shapes, key=distance)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Next-byte prediction; calling it gives the mean loss in nats."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.window = nn.Embedding(WINDOW * VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        # Under zero.Init the weights are on disk already; `apply` brings each module's own back for the edit.
        self.apply(lambda module: self._initialise(module, shape))

    def _initialise(self, module: nn.Module, shape: Shape) -> None:
        if module is self.window:
            # Far larger than the positions, so that bytes stay recognisable; older bytes matter less.
            for age, table in enumerate(torch.split(self.window.weight, VOCABULARY)):
                nn.init.normal_(table, std=0.7**age)
        elif module is self.head:
            nn.init.zeros_(self.head.weight)
        elif module is self.norm:
            nn.init.constant_(self.norm.weight, HEAD_GAIN)
        elif isinstance(module, nn.Linear):
            # What writes to the residual stream starts smaller, so that its size does not grow with depth.
            writes = module.in_features > shape.width or module.out_features == shape.width
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * shape.layers) if writes else 0.02)
        elif module is self.position:
            nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both (batch, time) of int64."""
        time, ages = (torch.arange(count, device=tokens.device) for count in (tokens.shape[1], WINDOW))
        last_bytes = F.pad(tokens, (WINDOW - 1, 0)).unfold(1, WINDOW, 1).flip(2)  # (batch, time, age)
        x = self.window(last_bytes + VOCABULARY * ages).sum(2) + self.position(time)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
