"""Checkpointing as transformers switches it on: on its own classes, with both of torch's kinds, on every tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HYPER
from models import make_config, seeded, trainability
from reference import Reference, differences, snapshot
from torch import Tensor

import zero

transformers = pytest.importorskip("transformers")

Open = Callable[..., Any]
LENGTH, STEPS = 48, 3
NVME = ("nvme", "nvme")


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """Tied embeddings, and dropout in every block."""
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH, resid_pdrop=0.2, embd_pdrop=0.2,
        attn_pdrop=0.2, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def build(family: Callable[[], Any], *, reentrant: bool | None = None) -> Any:
    with seeded(0):
        model = family().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def train(trainer: Any) -> list[float]:
    losses = []
    with seeded(5):
        for index in range(STEPS):
            ids = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(index))
            loss = trainer(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
            trainer.backward(loss)
            trainer.step()
    return losses


def reference_of(engine: Any, family: Callable[[], Any]) -> Reference:
    return Reference(build(family), lambda _: HYPER)


BLOCKS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"activation_device": "cpu", "activation_offloading": True},
    "nvme": {"activation_device": "nvme", "activation_offloading": True},
}


OFTEN = [(llama, True, "nvme"), (llama, False, "none"), (gpt2, False, "nvme"), (gpt2, True, "none")]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("family", "reentrant", "device"), [
    pytest.param(family, reentrant, device, marks=[] if (family, reentrant, device) in OFTEN else [pytest.mark.slow])
    for family in (llama, gpt2) for reentrant in (True, False, None) for device in BLOCKS])  # fmt: skip
def test_a_model_of_transformers_trains_as_plain_torch_does(
    open_engine: Open, nvme_path: Path, family: Callable[[], Any], reentrant: bool | None, device: str
) -> None:
    model = build(family, reentrant=reentrant)
    names = trainability(model)
    block = {**BLOCKS[device], **({"nvme_path": str(nvme_path)} if device == "nvme" else {})}
    engine = open_engine(model, make_config(NVME, nvme_path, activation_checkpointing=block))
    reference = reference_of(engine, family)
    assert train(engine) == train(reference)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    statistics = engine.statistics()
    assert all(releases >= STEPS for releases in statistics.releases_by_unit.values())
    assert (statistics.activation_stored_bytes > 0) == (device != "none") and statistics.activation_kept_bytes == 0


@pytest.mark.parametrize("device", ["nvme"])
@pytest.mark.parametrize("family", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_our_checkpoint_in_the_place_of_torchs_keeps_the_inputs_of_the_blocks(
    open_engine: Open, nvme_path: Path, family: Callable[[], Any], device: str
) -> None:
    model = build(family)
    names = trainability(model)
    model._set_gradient_checkpointing(True, zero.checkpointing.checkpoint)
    block = {"activation_device": device, "nvme_path": str(nvme_path)}
    engine = open_engine(model, make_config(NVME, nvme_path, activation_checkpointing=block))
    reference = reference_of(engine, family)
    assert train(engine) == train(reference)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    hidden: Tensor = torch.empty(2, LENGTH, 32, dtype=torch.bfloat16)
    assert engine.statistics().activation_stored_bytes == STEPS * 3 * hidden.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_little_may_be_live_where_blocks_are_recomputed(open_engine: Open, nvme_path: Path, reentrant: bool) -> None:
    """A block comes again while the backward of its last module holds that one's weights."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = build(lambda: transformers.LlamaForCausalLM(config), reentrant=reentrant)
    engine = open_engine(model, make_config(("cpu", "cpu"), nvme_path, zero={"stage3_max_live_parameters": 4096}))
    text = torch.arange(32)[None]
    engine.backward(engine(input_ids=text, labels=text).loss)
    engine.step()
    assert engine.global_steps == 1
