"""The models of the support table: real classes of transformers and peft with tiny random configs, and small models.

Each row can build its model with a kind of activation checkpointing, and make its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, TOKENS, VOCAB, WIDTH, Block, next_token_loss, seeded, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Checkpoint = Callable[..., Any]
"""(function, *inputs) -> its output, which is recomputed in backward."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        build: makes the model; the argument wraps a block's call, or is None.
        feed: keyword arguments of micro-batch number i.
        note: information for users of such a model.
        needs: packages that the model needs.
        recompiled: number of graphs compiled so far; it must not grow after the second step.
        opaque: endings of the names of quantised storage.
    """

    build: Callable[[Checkpoint | None], nn.Module]
    feed: Callable[[int], dict[str, Any]]
    note: str = ""
    needs: tuple[str, ...] = ()
    recompiled: Callable[[], int] | None = None
    opaque: tuple[str, ...] = ()

    def make(self, recompute: Checkpoint | None) -> nn.Module:
        """The model with fixed weights; frozen weights are exactly representable in bf16."""
        with seeded(0):
            model = self.build(recompute)
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16().float()
        return model.train()


def loss_in(output: Any) -> Tensor:
    """The loss that a model has returned, alone or inside its output."""
    return output if isinstance(output, Tensor) else output.loss


# ---- written by hand --------------------------------------------------------------------------


class Trunk(GPT):
    """The tiny GPT whose blocks are called through `recompute`, a checkpointing function or None."""

    def __init__(self, recompute: Checkpoint | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.wrapped = recompute

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        if self.wrapped is not None and not x.requires_grad:
            x.requires_grad_()  # a frozen embedding: reentrant checkpointing sees no gradient otherwise
        for block in self.blocks:
            x = self.call(block, x)
        return self.norm(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if self.wrapped is None else self.wrapped(block, x)


class Branchy(Trunk):
    """Odd batches use another block than even ones, and also skip the last block."""

    def forward(self, tokens: Tensor, branch: int) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        x = self.call(self.blocks[branch % 2], x)
        if branch % 2 == 0:
            x = self.call(self.blocks[2], x)
        return next_token_loss(self.head(self.norm(x)), tokens)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseBlock(nn.Module):
    """Mixtral's layer as its authors wrote it: experts in a ModuleList, two of them per token."""

    def __init__(self, width: int, heads: int, experts: int = 4) -> None:
        super().__init__()
        whole = Block(width, heads)
        self.norm_in, self.attention, self.norm_mid = whole.norm_in, whole.attention, whole.norm_mid
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_in(x))
        return x + self.mixed(self.norm_mid(x).flatten(0, 1)).view_as(x)

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


class SparseGPT(Trunk):
    def __init__(self, recompute: Checkpoint | None = None) -> None:
        super().__init__(recompute, blocks=2)
        self.blocks = nn.ModuleList(SparseBlock(WIDTH, 2) for _ in range(2))


class ConvBlock(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm: its buffers change in forward, and activations are in place."""

    def __init__(self, recompute: Checkpoint | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 8)
        self.wrapped = recompute

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixels.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = x + (block(x) if self.wrapped is None else self.wrapped(block, x))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class QuantLinear(nn.Module):
    """A frozen 4-bit Linear, with two weights in a byte and a scale per row, plus a low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        weight = base.weight.detach()
        scale = (weight.abs().amax(1, keepdim=True) / 7).bfloat16().float()
        codes = (weight / scale).round().clamp(-7, 7).add(8).to(torch.uint8)
        self.packed = nn.Parameter(codes[:, 0::2] | (codes[:, 1::2] << 4), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
        self.low = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.high = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)
        weight = ((codes - 8.0) * self.scale).to(x.dtype)
        return F.linear(x, weight, self.bias) + F.linear(F.linear(x, self.low), self.high)


class QuantGPT(Trunk):
    def __init__(self, recompute: Checkpoint | None = None) -> None:
        super().__init__(recompute)
        self.requires_grad_(False)
        for block in self.blocks:
            block.attention.qkv, block.attention.out = map(QuantLinear, (block.attention.qkv, block.attention.out))
            block.up, block.down = QuantLinear(block.up), QuantLinear(block.down)


def compiled(recompute: Checkpoint | None) -> nn.Module:
    """Compiled block-wise, as in transformers and torchtitan; the graph is really traced, but runs ATen's code."""
    torch._dynamo.reset()
    model = Trunk(recompute, blocks=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# ---- from transformers and peft ---------------------------------------------------------------


def recomputing(model: Any, recompute: Checkpoint | None) -> nn.Module:
    """Checkpoint every layer, as `gradient_checkpointing_enable` does, but with our function."""
    if recompute is not None:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute)
        if not any(p.requires_grad for p in model.get_input_embeddings().parameters()):
            model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 2, "attn_implementation": "eager"}


def llama(recompute: Checkpoint | None, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=3, num_key_value_heads=1, max_position_embeddings=16, **more
    )
    return recomputing(LlamaForCausalLM(config), recompute)


def gpt2(recompute: Checkpoint | None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=WIDTH, n_layer=3, n_head=2, attn_implementation="eager"
    )
    return recomputing(GPT2LMHeadModel(config), recompute)


def t5(recompute: Checkpoint | None) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0, attn_implementation="eager")
    return recomputing(T5ForConditionalGeneration(config), recompute)


def mixtral(recompute: Checkpoint | None) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES,
        intermediate_size=32,
        num_hidden_layers=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        experts_implementation="eager",
    )
    return recomputing(MixtralForCausalLM(config), recompute)


def vit(recompute: Checkpoint | None) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=8, attn_implementation="eager")
    return recomputing(ViTForImageClassification(config), recompute)


def peft_llama(recompute: Checkpoint | None) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = get_peft_model(llama(None), config)  # type: ignore[arg-type]
    recomputing(model.base_model.model, recompute)
    return model  # type: ignore[no-any-return]


# ---- their inputs -----------------------------------------------------------------------------


def text(index: int) -> dict[str, Any]:
    return {"tokens": tokens(index)}


def branching_text(index: int) -> dict[str, Any]:
    return {"tokens": tokens(index), "branch": index}


def labelled_text(index: int) -> dict[str, Any]:
    return {"input_ids": tokens(index), "labels": tokens(index)}


def translated_text(index: int) -> dict[str, Any]:
    return {"input_ids": tokens(index), "labels": tokens(index + 100, length=TOKENS - 3)}


def images(index: int, name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    pixels = torch.randn(4, 3, 8, 8, generator=generator).bfloat16()
    return {name: pixels, "labels": torch.randint(8, (4,), generator=generator)}


HF = ("transformers",)
ROWS: dict[str, Row] = {
    "dense GPT": Row(Trunk, text),
    "tied embeddings": Row(partial(Trunk, tied=True), text),
    "Llama": Row(llama, labelled_text, needs=HF),
    "GPT-2": Row(gpt2, labelled_text, needs=HF),
    "T5": Row(t5, translated_text, needs=HF),
    "MoE, experts in a ModuleList": Row(SparseGPT, text),
    "MoE, packed experts (Mixtral)": Row(mixtral, labelled_text, needs=HF),
    "ViT": Row(vit, partial(images, name="pixel_values"), needs=HF),
    "conv net with BatchNorm": Row(ConvNet, partial(images, name="pixels")),
    "branches": Row(Branchy, branching_text),
    "LoRA (peft on Llama)": Row(peft_llama, labelled_text, needs=(*HF, "peft")),
    "QLoRA-like (packed uint8)": Row(QuantGPT, text, opaque=(".packed", ".scale")),
    "torch.compile, block-wise": Row(compiled, text, recompiled=graphs_compiled),
}


def torch_checkpoint(reentrant: bool) -> Checkpoint:
    """torch.utils.checkpoint.checkpoint, reentrant or not."""
    return partial(checkpoint, use_reentrant=reentrant)
