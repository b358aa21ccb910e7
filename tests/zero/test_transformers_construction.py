"""Models of transformers under `zero.Init`: the bits of a construction in memory, however it is built or loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config, seeded
from torch import nn

import zero
from offload.errors import StateError
from zero.params import initial_store
from zero.params.released_parameter import ReleasedParameter

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("swaps")

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SMALL))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))


def t5() -> Any:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL)
    return transformers.ViTForImageClassification(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **SMALL)
    return transformers.MixtralForCausalLM(config)


def from_config() -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=64, **SMALL))


def inside_another() -> nn.Module:
    """A parent that builds two models, initialises a child's parameters and ties across them."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = llama(), llama()
            nn.init.normal_(self.one.lm_head.weight, std=0.5)
            self.other.model.embed_tokens.weight = self.one.model.embed_tokens.weight
            self.scale = nn.Parameter(self.one.lm_head.weight.norm().detach())

    return Pair()


MAKERS = {f.__name__: f for f in (llama, gpt2, t5, vit, mixtral, from_config, inside_another)}


def assert_masters(engine: Any, plain: nn.Module) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in engine.module.named_parameters()] == names
    for name, value in plain.named_parameters():
        assert torch.equal(engine.full_master(name), value.detach().float()), name


@pytest.mark.parametrize(
    ("name", "fetched_bytes_max"), [*((name, None) for name in MAKERS), ("t5", 4096), ("inside_another", 4096)]
)
def test_a_model_has_the_bits_of_one_built_in_memory(
    open_engine: Open,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fetched_bytes_max: int | None,
) -> None:
    """With little memory, what the root's initialisation has brought in is spilled while it still runs."""
    if fetched_bytes_max is not None:
        monkeypatch.setattr(initial_store, "FETCHED_BYTES_MAX", fetched_bytes_max)
    config = make_config(NVME, nvme_path)
    with seeded(3):
        plain = MAKERS[name]()
        after = torch.rand(3)
    with seeded(3):
        with zero.Init(config_dict_or_path=config):
            model = MAKERS[name]()
        assert torch.equal(torch.rand(3), after), "the generator is where it would be"
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    del config["zero_optimization"]["stage3_max_live_parameters"]  # packed experts are large
    assert_masters(open_engine(model, config), plain)


@pytest.mark.parametrize("pair", [NVME, ("cpu", "cpu")], ids="-".join)
def test_dtype_gives_the_bits_of_an_fp32_construction_and_a_cast(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    config = make_config(pair, nvme_path)
    with seeded(3):
        plain = llama().to(torch.bfloat16)
    with seeded(3), zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = llama()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with zero.GatheredParameters(model.lm_head.weight):
        assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert_masters(open_engine(model, config), plain)


@pytest.mark.parametrize("engine", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_save_pretrained_writes_the_values_or_no_file(
    open_engine: Open, nvme_path: Path, tmp_path: Path, make: Callable[[], Any], engine: bool
) -> None:
    config, folder = make_config(NVME, nvme_path, bf16=False), tmp_path / "saved"
    with seeded(4):
        plain = make()
    with seeded(4), zero.Init(config_dict_or_path=config):
        model = make()
    if engine:
        open_engine(model, config)
    with pytest.raises(StateError, match=r"is released.*GatheredParameters"):
        model.save_pretrained(folder)
    assert list(folder.glob("*.safetensors")) == []
    with zero.GatheredParameters(list(model.parameters())):
        model.save_pretrained(folder)
    loaded = type(plain).from_pretrained(folder)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_from_pretrained_works_inside(open_engine: Open, nvme_path: Path, tmp_path: Path, shard: str) -> None:
    with seeded(4):
        saved = gpt2()  # its head is tied
    saved.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) is (shard == "20KB")
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert all(isinstance(p, ReleasedParameter) for p in model.parameters()), "the whole model was in memory"
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_masters(open_engine(model, config), saved)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_what_from_pretrained_packs_and_initialises_is_never_in_memory_as_a_whole(
    open_engine: Open, nvme_path: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Experts lie apart in the folder, and the head for classes is not there."""
    with seeded(4):
        mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    load = transformers.MixtralForSequenceClassification.from_pretrained
    config = make_config(NVME, nvme_path)
    with seeded(5):
        plain = load(tmp_path / "saved", dtype="auto")
    held = []
    with seeded(5), pytest.MonkeyPatch.context() as patch, zero.Init(config_dict_or_path=config, dtype=dtype):
        assign = nn.Module.__setattr__

        def noting(module: nn.Module, name: str, value: Any) -> None:
            assign(module, name, value)
            if isinstance(value, nn.Parameter) and not value.is_meta:
                held.append(isinstance(value, ReleasedParameter))

        patch.setattr(nn.Module, "__setattr__", noting)
        model = load(tmp_path / "saved", dtype="auto")
    assert len(held) >= len(list(plain.parameters()))
    assert all(held), "a parameter was in memory after it had its values"
    assert {p.dtype for p in model.parameters()} == {dtype or torch.bfloat16}
    del config["zero_optimization"]["stage3_max_live_parameters"]
    assert_masters(open_engine(model, config), plain)


def test_a_saved_model_is_streamed_into_one_that_was_built_inside(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    with seeded(4):
        saved = t5()
    saved.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = t5()
    zero.load_pretrained(model, tmp_path / "saved")
    assert_masters(open_engine(model, config), saved)
