"""`from_pretrained` of transformers loads what is written, from a live engine and from a checkpoint, and ties again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config, seeded, tokens
from torch import nn

from zero.tools.cli import main

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

Open = Callable[..., Any]
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 32, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0}


def gpt2(*, tied: bool) -> Any:
    config = transformers.GPT2Config(**GPT2, eos_token_id=0, tie_word_embeddings=tied)
    return transformers.GPT2LMHeadModel(config)


def llama(*, tied: bool) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def mixtral(*, tied: bool) -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=tied)
    return transformers.MixtralForCausalLM(config)


class HeadFirstConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    model_type = "head_first"

    def __init__(self, vocab: int = 64, width: int = 32, **more: Any) -> None:
        self.vocab, self.width = vocab, width
        super().__init__(**more)


class HeadFirst(transformers.PreTrainedModel):  # type: ignore[misc]
    """The name that comes first is the one that the model says is tied to the other."""

    config_class = HeadFirstConfig
    _tied_weights_keys = {"head.weight": "table.weight"}  # noqa: RUF012 - transformers' own

    def __init__(self, config: HeadFirstConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.table = nn.Embedding(config.vocab, config.width)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(self.table(input_ids)).float().square().mean(),)


def head_first(*, tied: bool) -> Any:
    return HeadFirst(HeadFirstConfig(tie_word_embeddings=tied))


def keys(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def loads_as(folder: Path, model: Any, values: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Load the folder without a complaint, and find these values."""
    model.config.save_pretrained(folder)
    back, told = type(model).from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(told.values()), told
    wanted = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in back.named_parameters(remove_duplicate=False)] == list(wanted)
    for name, value in back.named_parameters():
        assert value.dtype == dtype and torch.equal(value, values[name]), name
    if model.config.tie_word_embeddings:
        assert back.get_input_embeddings().weight is back.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (gpt2, True),
        (gpt2, False),
        (llama, True),
        pytest.param(llama, False, marks=pytest.mark.slow),
        (mixtral, False),
        (head_first, True),
    ],
)
def test_a_trained_model_comes_back_by_from_pretrained(
    open_engine: Open, nvme_path: Path, tmp_path: Path, make: Callable[..., Any], tied: bool
) -> None:
    with seeded(1):
        model = make(tied=tied)
    if make in (gpt2, llama):  # others have names of their own for packed experts, or another name for the tied one
        model.save_pretrained(tmp_path / "theirs")
    saving = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, zero=saving))
    for index in range(2):
        engine.backward(engine(input_ids=tokens(index), labels=tokens(index))[0])
        engine.step()
    names = [name for name, _ in model.named_parameters()]
    weights = {name: engine.full_parameter(name) for name in names}
    masters = {name: engine.full_master(name) for name in names}
    engine.save_16bit_model(tmp_path / "live16")
    engine.save_fp32_model(tmp_path / "live32", max_shard_size="20KB")
    engine.save_checkpoint(tmp_path / "saved")
    for dtype in ("bf16", "fp32"):
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / dtype), "--dtype", dtype]) == 0
    for folder in ("live16", "bf16"):
        loads_as(tmp_path / folder, model, weights, torch.bfloat16)
    for folder in ("live32", "fp32"):
        loads_as(tmp_path / folder, model, masters, torch.float32)
    written = [keys(tmp_path / folder) for folder in ("live16", "live32", "bf16", "fp32")]
    assert all(found == written[0] for found in written)
    if make in (gpt2, llama):
        assert written[0] == keys(tmp_path / "theirs")
