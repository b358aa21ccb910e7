"""PEFT's LoRA on a Llama of transformers: the classes users have, at stage 3, on every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import reference_of
from models import VOCAB, freeze, make_config, seeded, tokens, trainability
from reference import differences, snapshot

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

Open = Callable[..., Any]
STEPS = 4


def llama(base_dtype: torch.dtype, recompute: bool | None = None) -> Any:
    """A random Llama with fp32 LoRA adapters on its attention and MLP; `recompute`: reentrant or not."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    with seeded(0):
        base = transformers.LlamaForCausalLM(config)
        freeze(base)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(base.to(base_dtype), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would leave the adapters without an effect
                torch.nn.init.normal_(parameter, std=0.1)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
        model.enable_input_require_grads()
    return model.train()


def train(trainer: Any) -> list[float]:
    losses = []
    for index in range(STEPS):
        batch = tokens(index)
        loss = trainer(input_ids=batch, labels=batch, use_cache=False).loss
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32 adapters on a bf16 base"])
@pytest.mark.parametrize("recompute", [None, True, False], ids=["stored", "reentrant", "nonreentrant"])
def test_lora_on_a_llama_trains_to_the_bits_of_a_run_without_the_engine(
    open_engine: Open, nvme_path: Any, device: str, bf16: bool, recompute: bool | None
) -> None:
    dtype = torch.float32 if bf16 else torch.bfloat16
    model = llama(dtype, recompute)
    names = trainability(model)
    adapters = [name for name, trainable in names if trainable]
    assert adapters and all("lora_" in name for name in adapters)
    engine = open_engine(model, make_config((device, device), nvme_path, bf16=bf16, clipping=0.3))
    assert {unit.dtype for unit in engine.units if unit.trainable} == {torch.bfloat16 if bf16 else torch.float32}
    assert {unit.dtype for unit in engine.units if not unit.trainable} == {torch.bfloat16}
    losses = train(engine)
    reference = reference_of(llama(dtype), bf16=bf16, clipping=0.3)
    assert losses == train(reference)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    statistics = engine.statistics()
    assert statistics.gathered_bytes > 0
    assert all(releases >= STEPS for releases in statistics.releases_by_unit.values())


def test_switching_the_adapters_off_for_a_forward_gives_the_base(open_engine: Open, nvme_path: Any) -> None:
    """What preference losses do for their reference model: the same engine, no second copy of the base."""
    model = llama(torch.float32)
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    train(engine)
    plain = llama(torch.float32).bfloat16()
    batch = tokens(9)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        ours = engine(input_ids=batch, use_cache=False).logits
        theirs = plain(input_ids=batch, use_cache=False).logits
    assert torch.equal(ours, theirs)
    engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
    engine.step()
