"""The small models that tests train, their training text, and their configs.

The models have few parameters, but complex structures: attention, ModuleList, tied heads, frozen bases, modules used
twice or not at all, parameters of awkward sizes, outputs that are not tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, TOKENS, BATCH = 64, 32, 8, 2
LIVE_NUMEL = 60_000
"""A live limit with which every block of the tiny GPT (12.7 k elements) is a separate unit."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mid = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_in(x))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class GPT(nn.Module):
    """Embedding, blocks in a ModuleList, final norm, head; returns the next-token loss in fp32.

    `recompute` is None, "reentrant" or "nonreentrant": torch.utils.checkpoint around every block.
    """

    def __init__(
        self,
        vocab: int = VOCAB,
        width: int = WIDTH,
        blocks: int = 3,
        heads: int = 2,
        tokens: int = TOKENS,
        tied: bool = False,
        recompute: str | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        if self.recompute == "reentrant" and not x.requires_grad and torch.is_grad_enabled():
            x.requires_grad_()  # reentrant checkpointing sees no gradient otherwise
        for block in self.blocks:
            x = self.call(block, x)
        return self.norm(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.head(self.trunk(tokens)), tokens)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class LoraLinear(nn.Module):
    """A frozen Linear with a trainable low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.high = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.low), self.high)


def lora_gpt(**sizes: Any) -> GPT:
    """A GPT whose base is frozen and whose attention and MLP carry adapters."""
    model = GPT(**sizes)
    freeze(model)
    for block in model.blocks:
        block.attention.qkv = LoraLinear(block.attention.qkv)
        block.up = LoraLinear(block.up)
    return model


def freeze(module: nn.Module) -> None:
    """Freeze `module`. Its values are rounded to bf16 here, since the engine does not promise how it rounds them."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.bfloat16().float()


class MixedGPT(GPT):
    """A GPT with a frozen embedding, a frozen block, and a layer and a bare parameter that forward never touches."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.randn(7))
        freeze(self.embedding)
        freeze(self.blocks[1])


class OddSizes(nn.Module):
    """Parameters of 0, 1 and 513 elements, a scalar and a 3-d parameter, all used, between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 27)
        self.nothing = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.odd = nn.Parameter(0.1 * torch.randn(513))
        self.cube = nn.Parameter(0.1 * torch.randn(3, 3, 3))
        self.head = nn.Linear(27, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scalar + self.cube.flatten() * self.one
        x = x + self.odd.view(27, 19).sum(1) + self.nothing.sum()
        return next_token_loss(self.head(x), tokens)


class Reused(GPT):
    """The same block runs before and after the others: used twice in one forward."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in (*self.blocks, self.blocks[0]):
            x = self.call(block, x)
        return self.norm(x)


class Branching(GPT):
    """`branch` selects one of two blocks; the other gets no gradient in that pass."""

    def forward(self, tokens: Tensor, branch: int = 0) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        x = self.blocks[0](x)
        x = self.blocks[1 + branch % 2](x)
        return next_token_loss(self.head(self.norm(x)), tokens)


class EarlyExit(GPT):
    """`depth` is the number of blocks that run; norm and head run only if all blocks do."""

    def forward(self, tokens: Tensor, depth: int | None = None) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks[:depth]:
            x = block(x)
        if depth is not None:
            return x.float().square().mean()
        return next_token_loss(self.head(self.norm(x)), tokens)


@dataclass
class Output:
    loss: Tensor
    extras: dict[str, Any]


class Structured(GPT):
    """Blocks that take keywords and return dicts, a model that returns a dataclass."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
            return {"x": [self.inner(state["x"][0])], "depth": state["depth"] + 1}

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(Structured.Wrapped(block) for block in self.blocks)

    def forward(self, tokens: Tensor) -> Output:
        state = {"x": [self.embedding(tokens) + self.position[: tokens.shape[1]]], "depth": 0}
        for block in self.blocks:
            state = block(state=state)
        logits = self.head(self.norm(state["x"][0]))
        return Output(next_token_loss(logits, tokens), {"depth": state["depth"], "logits": logits})


class TwoLosses(GPT):
    """Two losses from one graph: the head's loss, and a loss on the trunk's activations."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(tokens)
        return next_token_loss(self.head(x), tokens), x.float().square().mean()


class Stumbling(GPT):
    """Raises on request: in forward after block `fail_after`, or in backward before block `fail_back_at`."""

    class Stumble(Exception):
        pass

    fail_after: int | None = None
    fail_back_at: int | None = None

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            if index == self.fail_after:
                raise Stumbling.Stumble(f"after block {index}")
            x = block(x)
            if index == self.fail_back_at:
                x.register_hook(self.stumble)
        return self.norm(x)

    def stumble(self, gradient: Tensor) -> None:
        raise Stumbling.Stumble("in backward")


class BigEmbedding(nn.Module):
    """A table of `rows` x `width`, of which a step uses only a few rows, and a small head."""

    def __init__(self, rows: int, width: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, _weight=patterned(rows, width))
        self.head = nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(rows)).float(), rows % self.head.out_features)


def patterned(rows: int, width: int, first: int = 0) -> Tensor:
    """A table whose rows are functions of their numbers, so that some rows can be made without the others."""
    ids = torch.arange(first, first + rows, dtype=torch.float32)
    return torch.sin(ids.remainder(8191.0)[:, None] * 0.37 + torch.arange(width)) * 0.1


class FixedGradients(nn.Module):
    """loss = sum of parameter x given tensor: the gradient is the given tensor, for any values of the parameters."""

    SHAPES = ((33, 17), (513,), (1,), (), (64, 64))

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in self.SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt": GPT,
    # Its planes are larger than a working set, so that a budget decides about tiers.
    "middle": lambda **sizes: GPT(width=256, blocks=2, vocab=512, **sizes),
    "tied": lambda **sizes: GPT(tied=True, **sizes),
    "lora": lora_gpt,
    "mixed": MixedGPT,
    "odd_sizes": OddSizes,
    "reused": Reused,
    "branching": Branching,
    "early_exit": EarlyExit,
    "structured": Structured,
    "two_losses": TwoLosses,
    "stumbling": Stumbling,
}


def build(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """One of MODELS, with weights that depend only on the seed."""
    with seeded(seed):
        return MODELS[name](**sizes)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generator has a fixed seed; afterwards its old state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tokens(index: int, *, batch: int = BATCH, length: int = TOKENS, vocab: int = VOCAB) -> Tensor:
    """Micro-batch number `index` of an endless text with unevenly distributed tokens, so that training can learn."""
    generator = torch.Generator().manual_seed(1_000 + index)
    return (torch.rand(batch, length, generator=generator).square() * vocab).long()


def trainability(model: nn.Module) -> tuple[tuple[str, bool], ...]:
    """(name, trainable) of every parameter; call it before an engine takes the model."""
    return tuple((name, parameter.requires_grad) for name, parameter in model.named_parameters())


ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def make_config(
    pair: tuple[str, str],
    nvme_path: Any,
    *,
    accumulation: int = 1,
    clipping: float = 0.0,
    bf16: bool | dict[str, Any] = True,
    optimizer: dict[str, Any] | None = None,
    **top_level: Any,
) -> dict[str, Any]:
    """A DeepSpeed-style config for (offload_param, offload_optimizer); `zero={...}` adds keys to its section."""
    param, states = pair
    place = {"nvme_path": str(nvme_path)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "bf16": bf16 if isinstance(bf16, dict) else {"enabled": bf16},
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)} if optimizer is None else optimizer,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, **(place if param == "nvme" else {})},
            "offload_optimizer": {"device": states, **(place if states == "nvme" else {})},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": LIVE_NUMEL,
            "stage3_prefetch_bucket_size": 15_000,
            "stage3_max_reuse_distance": 0,
        },
    }
    for key, value in top_level.pop("zero", {}).items():
        section = config["zero_optimization"]
        section[key] = {**section.get(key, {}), **value} if isinstance(value, dict) else value
    if not config["optimizer"]:
        del config["optimizer"]
    return {**config, **top_level}
