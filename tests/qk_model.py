"""A tiny Llama with enlarged queries and keys in some heads, so that their attention logits are large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import make_config, seeded
from torch import Tensor, nn

HIDDEN, HEADS, LAYERS, VOCAB, TOKENS = 32, 4, 2, 64, 9
THRESHOLD = 3.0
WIDTH = HIDDEN // HEADS
MICRO_BATCHES, LARGER = (1, 3), 9
"""Of MICRO_BATCHES one has the largest logit of the first head, the other of the second; LARGER has a larger one."""


def llama(key_heads: int = HEADS, *, bias: bool = True) -> nn.Module:
    """The model in fp32, with the first half of the heads enlarged."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_key_value_heads=key_heads,
        attention_bias=bias,
        attn_implementation="sdpa",
        **shape,
    )
    with seeded(0):
        model: nn.Module = LlamaForCausalLM(config)
    with torch.no_grad():
        for module in attention_of(model):
            module.q_proj.weight.mul_(20)
            module.k_proj.weight.mul_(20)
            module.q_proj.weight[HIDDEN // 2 :].div_(1000)
            if bias:
                module.q_proj.bias.normal_(generator=torch.Generator().manual_seed(1))
                module.q_proj.bias[HIDDEN // 2 :] = 0
    return model


def attention_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "q_proj")]


def tokens(index: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(index))


def config_of(
    pair: tuple[str, str], folder: Path | str, *, threshold: float | None = THRESHOLD, lr: float = 0.0, **more: Any
) -> dict[str, Any]:
    params = {"lr": lr, "weight_decay": 0.0, **({} if threshold is None else {"qk_clip": threshold})}
    return make_config(pair, folder, optimizer={"type": "Muon", "params": params}, **{"bf16": False, **more})


def loss_of(trainer: Any, index: int) -> Tensor:
    given = tokens(index).to(trainer.device)
    loss: Tensor = trainer(given, labels=given).loss
    return loss


def factors_of(masters: dict[str, Tensor]) -> Tensor:
    """(2,): the factors by which the queries of each enlarged head have shrunk, in the first layer."""
    name = "model.layers.0.self_attn.q_proj.weight"
    ratios = (masters[name] / llama().get_parameter(name).detach())[: HIDDEN // 2].double()
    return ratios.view(2, -1).mean(1)


def logits_of(model: nn.Module, index: int) -> tuple[list[Tensor], list[Tensor]]:
    """Computed independently of the engine, with a plain model in fp64: the largest logit of each head in each layer,
    and the largest sum of magnitudes of the terms of such a logit."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    model = model.double()
    seen: dict[int, tuple[Tensor, Any]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, given, named: seen.__setitem__(id(m), (named["hidden_states"], named["position_embeddings"])),
            with_kwargs=True,
        )
        for module in attention_of(model)
    ]
    with torch.no_grad():
        model(tokens(index))
    for handle in handles:
        handle.remove()
    largest, magnitudes = [], []
    hidden = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
    for module in attention_of(model):
        x, turn = seen[id(module)]

        def heads(made: Tensor) -> Tensor:
            return made.view(*made.shape[:2], -1, WIDTH).transpose(1, 2)

        q, k = apply_rotary_pos_emb(heads(module.q_proj(x)), heads(module.k_proj(x)), *turn)
        logits = q @ repeat_kv(k, q.shape[1] // k.shape[1]).transpose(2, 3) * module.scaling
        largest.append(logits.masked_fill(hidden, -torch.inf).amax((0, 2, 3)).detach())
        parts = [
            heads(x.abs() @ p.weight.abs().T + (0 if p.bias is None else p.bias.abs()))
            for p in (module.q_proj, module.k_proj)
        ]
        # A rotation replaces each element by a sum of two: a product of two such elements grows at most by a factor 2.
        sums = 2 * parts[0] @ repeat_kv(parts[1], q.shape[1] // k.shape[1]).transpose(2, 3) * module.scaling
        magnitudes.append(sums.amax((0, 2, 3)).detach())
    return largest, magnitudes
