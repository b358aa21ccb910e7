"""The odd blocks that fuzzed models are made of, and the model around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from models import freeze, next_token_loss, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, TOKENS, SAMPLES = 48, 16, 6, 2
HEADS = 3
DECAY = 0.01


class Stumble(Exception):
    """On purpose, inside a forward."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.other(F.relu(self.one(x)))


class Frozen(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.low, self.high = nn.Parameter(0.1 * torch.randn(2, WIDTH)), nn.Parameter(0.1 * torch.randn(WIDTH, 2))
        freeze(self.base)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.base(x) + F.linear(F.linear(x, self.low), self.high)


class Listed(nn.Module):
    """Parameters without a module: none at all, a scalar, a row, a cube, a matrix."""

    def __init__(self) -> None:
        super().__init__()
        shapes: tuple[tuple[int, ...], ...] = ((0,), (), (WIDTH,), (2, 2, WIDTH // 4), (WIDTH, WIDTH))
        self.values = nn.ParameterList(nn.Parameter(0.3 * torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        nothing, scalar, row, cube, matrix = self.values
        return x + F.linear(x * scalar + row + cube.flatten(), matrix) + nothing.sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.layer(self.norm(x))


class Batched(nn.Module):
    """Running statistics; in fp32 only, since what becomes of buffers in 16 bits is not for this reference to say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.layer(self.norm(x.flatten(0, 1)).view_as(x))


class Heads(nn.Module):
    """A layer of several, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HEADS))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.heads[turn % HEADS](x)


class Recomputed(nn.Module):
    """A checkpoint around a layer, which is called again outside of it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor, turn: int) -> Tensor:
        for _ in range(2):
            up = torch.relu(self.up(x))
            recomputed = torch.is_grad_enabled()  # torch warns where there is nothing to recompute
            x = x + (checkpoint(self.down, up, use_reentrant=self.reentrant) if recomputed else self.down(up))
        return x


class Spare(nn.Module):
    """A layer and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.bare = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + torch.sin(self.layer(x))


class Borrowed(nn.Module):
    """Reads the weights of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + F.linear(x, self.layer[0].weight.t()) + self.layer(x)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__.lower(): kind for kind in (Plain, Twice, Tied, Frozen, Listed, Normed, Batched, Heads)},
    "reentrant": partial(Recomputed, True),
    "recomputed": partial(Recomputed, False),
    "spare": Spare,
    "borrowed": Borrowed,
}
WAYS = ("tied head", "functional embedding", "decay before", "decay after", "kept list")
"""Of the model around the blocks."""


class Odd(nn.Module):
    """Returns the next-token loss, with a term over all parameters if so told."""

    def __init__(self, blocks: tuple[str, ...], ways: tuple[str, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if "tied head" in ways:
            self.head.weight = self.embedding.weight
        self.ways = ways
        self._kept = [list(self.parameters())]

    def forward(self, tokens: Tensor, turn: int = 0, stumble: int | None = None) -> Tensor:
        before = self.penalty() if "decay before" in self.ways else None
        functional = "functional embedding" in self.ways
        x = F.embedding(tokens, self.embedding.weight) if functional else self.embedding(tokens)
        x = x + self.position
        for index, block in enumerate(self.blocks):
            if index == stumble:
                raise Stumble(f"before block {index}")
            x = block(x, turn)
        loss = next_token_loss(self.head(x), tokens)
        loss = loss if before is None else loss + before
        return loss + self.penalty() if "decay after" in self.ways else loss

    def penalty(self) -> Tensor:
        parameters = self._kept[0] if "kept list" in self.ways else self.parameters()
        return DECAY * sum((p.float().square().sum() for p in parameters), torch.zeros(()))


def made(blocks: tuple[str, ...], ways: tuple[str, ...], seed: int = 0) -> Odd:
    """With weights that depend on the seed alone."""
    with seeded(seed):
        return Odd(blocks, ways)


def batch(index: int, rank: int) -> Tensor:
    """Micro-batch number `index` of a rank."""
    generator = torch.Generator().manual_seed(7_919 * index + rank)
    return (torch.rand(SAMPLES, TOKENS, generator=generator).square() * VOCAB).long()
