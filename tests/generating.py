"""Small generating models of transformers, and a training step for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import seeded, tokens
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

NEW_TOKENS = 6
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def llama(layers: int = 3, *, tied: bool = False) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=layers, max_position_embeddings=64, **sizes)
    config.tie_word_embeddings = tied
    return made(transformers.LlamaForCausalLM, config)


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 3}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    return made(transformers.T5ForConditionalGeneration, config)


def made(kind: Any, config: Any) -> nn.Module:
    config._attn_implementation = "eager"
    with seeded(0):
        model = kind(config)
    # No end of sequence, so that all runs are equally long. Larger weights than by default, so that tokens do not tie:
    # with ties equal outputs would prove nothing.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def generated(model: Any, way: str, new_tokens: int = NEW_TOKENS) -> Tensor:
    model.eval()
    with seeded(7):
        return model.generate(tokens(3), max_new_tokens=new_tokens, min_new_tokens=new_tokens, **WAYS[way])


def train(trainer: Any, index: int) -> None:
    trainer.train()
    batch = tokens(index)
    trainer.backward(trainer(input_ids=batch, labels=batch, use_cache=False).loss)
    trainer.step()
