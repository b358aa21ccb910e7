"""`init_inference`: forward-only, weights where the config says, and nothing that training would need."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, LIVE_NUMEL, build, tokens
from torch import Tensor, nn

import zero
from offload.errors import ConfigError, StateError

Open = Callable[..., Any]
TIERS = ["none", "cpu", "nvme"]


class Logits(GPT):
    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.trunk(batch))

    def generate(self, batch: Tensor, count: int = 4) -> Tensor:
        for _ in range(count):
            batch = torch.cat([batch, self(batch)[:, -1:].argmax(-1)], 1)
        return batch


def logits() -> nn.Module:
    model = build("gpt", tokens=16)
    model.__class__ = Logits
    return model


@pytest.fixture
def infer(nvme_path: Path) -> Iterator[Open]:
    """`infer(model, tier, **keys)` -> engine, closed at the end."""
    engines = []

    def opened(model: nn.Module, tier: str, **keys: Any) -> Any:
        engines.append(zero.init_inference(model, {"zero": zero_block(tier, nvme_path), **keys}))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def zero_block(tier: str, nvme_path: Path, live_numel: int = LIVE_NUMEL) -> dict[str, Any]:
    place = {"nvme_path": str(nvme_path)} if tier == "nvme" else {}
    return {
        "offload_param": {"device": tier, **place},
        "stage3_max_live_parameters": live_numel,
        "stage3_param_persistence_threshold": 0,
    }


@pytest.mark.parametrize("tier", TIERS)
def test_forward_and_generate_equal_the_plain_models(tier: str, infer: Open) -> None:
    model = logits()
    plain = copy.deepcopy(model).eval()
    engine = infer(model, tier)
    assert engine.module is model and not model.training
    with torch.no_grad():
        wanted, text = plain(tokens(0)), plain.generate(tokens(1))
    out = engine(tokens(0))
    assert torch.equal(out, wanted) and not out.requires_grad
    assert torch.equal(engine.module(tokens(0)), wanted)
    assert torch.equal(engine.generate(tokens(1)), text)
    with engine.generation():
        assert torch.equal(engine.module.generate(tokens(1)), text)
    assert engine.statistics().gathered_bytes > 0


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_of_training_is_allocated_or_moved(tier: str, infer: Open) -> None:
    engine = infer(logits(), tier)
    assert {row.array for row in engine.plan.rows} <= {
        *("weights", "gathered units", "stand-in for what is away", "pool: states and chunks in flight")
    }
    weights = sum(unit.nbytes for unit in engine.units)
    assert sum(row.nbytes for row in engine.plan.rows if row.array == "weights") == weights
    assert engine.optimizer is None
    before = engine.statistics()
    for index in range(3):
        engine(tokens(index))
    after = engine.statistics()
    assert after.nvme_write_bytes == before.nvme_write_bytes
    assert (after.nvme_read_bytes > before.nvme_read_bytes) == (tier == "nvme")


def test_weights_that_fit_are_read_once_for_all_forwards(nvme_path: Path) -> None:
    with zero.init_inference(logits(), zero=zero_block("nvme", nvme_path, live_numel=10**9)) as engine:
        engine(tokens(0))
        before = engine.statistics()
        engine.generate(tokens(1))
        engine(tokens(2))
        after = engine.statistics()
    assert before.gathered_bytes == sum(unit.nbytes for unit in engine.units)
    assert (after.gathered_bytes, after.nvme_read_bytes) == (before.gathered_bytes, before.nvme_read_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_casts_as_plain_torch_does(dtype: torch.dtype, infer: Open) -> None:
    model = logits()
    plain = copy.deepcopy(model).to(dtype).eval()
    engine = infer(model, "nvme", dtype=dtype)
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), plain(tokens(0)))
    assert {unit.dtype for unit in engine.units} == {dtype}


def test_a_model_built_under_init_is_used_from_the_disk(nvme_path: Path, infer: Open) -> None:
    plain = logits().to(torch.bfloat16).eval()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_block("nvme", nvme_path)}
    with zero.Init(config_dict_or_path=config):
        model = logits()
    with pytest.raises(ConfigError, match=r"dtype: parameter position is torch\.float32 and already on disk"):
        infer(model, "nvme", dtype="fp16")
    engine = infer(model, "nvme", dtype="bf16")
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), plain(tokens(0)))


def test_values_come_from_a_folder_of_safetensors(tmp_path: Path, infer: Open) -> None:
    from safetensors.torch import save_file

    saved = build("gpt", seed=1, tokens=16)
    saved.__class__ = Logits
    values = {name: value.detach().clone() for name, value in saved.state_dict().items()}
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"model: expected model\.safetensors, or .*; found neither"):
        infer(logits(), "cpu", checkpoint=str(folder))
    names = list(values)
    save_file({name: values[name] for name in names[:5]}, str(folder / "a.safetensors"))
    with pytest.raises(ConfigError, match=rf"missing in the checkpoint: .*{names[5]}.* and \d+ more"):
        infer(logits(), "cpu", checkpoint=str(folder))
    save_file({name: values[name] for name in names[5:]}, str(folder / "b.safetensors"))
    engine = infer(logits(), "nvme", checkpoint=str(folder))
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), saved.eval()(tokens(0)))
    save_file({names[0]: torch.zeros(2)}, str(folder / "b.safetensors"))
    with pytest.raises(ConfigError, match=rf"{names[0]} in .*b\.safetensors: expected shape .*, got \(2,\)"):
        infer(logits(), "cpu", checkpoint=str(folder))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel": {"tp_size": 2}}, r"tensor_parallel: got .*tp_size.*; .*zero\.offload_param"),
    ({"mp_size": 4}, r"mp_size: got 4; .*to stream a model that does not fit"),
    ({"quant": {"weight": {"num_bits": 2}}}, r"quant.weight: expected num_bits"),
    ({"moe": {"ep_size": 2}}, r"moe: .*set ep_size to 1"),
    ({"set_empty_params": True}, r"set_empty_params: .*zero\.Init"),
    ({"dtype": "int8"}, r"dtype: expected torch\.float32, .* got 'int8'"),
    ({"checkpoint": {"type": "ds_model"}}, r"checkpoint: expected a folder of \.safetensors files"),
    ({"zero": "nvme"}, r"zero: expected an object"),
    ({"dtipe": "bf16"}, r"dtipe: unknown key; the nearest known key is 'dtype'"),
    ({"zero": {"offload_param": {"device": "tape"}}}, r"offload_param\.device: expected .*got \"tape\""),
    ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, r'zero\.offload_param: expected "stage": 3'),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[next(iter(keys)) for keys, _ in REFUSED])
def test_what_is_not_available_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zero.init_inference(logits(), **keys)


def test_a_key_given_twice_must_agree_and_harmless_ones_pass(infer: Open) -> None:
    with pytest.raises(ConfigError, match="dtype: given twice"):
        zero.init_inference(logits(), {"dtype": "bf16"}, dtype="fp32")
    harmless = {"replace_with_kernel_inject": False, "mp_size": 1, "tensor_parallel": {"tp_size": 1}, "max_tokens": 8}
    engine = infer(logits(), "cpu", quant={"enabled": False}, **harmless)
    assert engine(tokens(0)).isfinite().all()


def test_kernels_that_compute_the_same_are_asked_for_without_effect(
    infer: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The first line of most published scripts of inference."""
    wanted = infer(logits(), "cpu")(tokens(0))
    asked = {"mp_size": 1, "replace_method": "auto", "replace_with_kernel_inject": True, "enable_cuda_graph": True}
    with caplog.at_level(logging.DEBUG, logger="zero"):
        engine = infer(logits(), "cpu", **asked, injection_policy={"Block": ("out",)}, use_triton=True)
    assert torch.equal(engine(tokens(0)), wanted)
    lines = [record.getMessage() for record in caplog.records]
    (listed,) = [line for line in lines if "these keys have no effect" in line]
    assert "replace_with_kernel_inject" in listed and "enable_cuda_graph" in listed and "use_triton" in listed
    assert len([line for line in lines if "block.compile()" in line]) == 1


def test_it_refuses_to_train_and_says_what_does(infer: Open) -> None:
    engine = infer(logits(), "cpu")
    with pytest.raises(StateError, match=r"step: .*init_inference .* use zero\.initialize"):
        engine.step()
    with pytest.raises(StateError, match=r"backward: .*init_inference .* use zero\.initialize"):
        engine.backward(torch.zeros(()))


def test_an_interrupt_in_generate_leaves_an_engine_that_works(infer: Open) -> None:
    engine = infer(logits(), "nvme")
    wanted = engine(tokens(0))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(tokens(0))
    handle.remove()
    assert torch.equal(engine(tokens(0)), wanted)


def test_weights_can_be_exchanged_while_it_serves(infer: Open) -> None:
    model, other = logits(), build("gpt", seed=1, tokens=16)
    other.__class__ = Logits
    engine = infer(model, "nvme")
    engine(tokens(0))
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter]), torch.no_grad():
            parameter.copy_(other.get_parameter(name))
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), other(tokens(0)))


def test_close_returns_everything(nvme_path: Path, nothing_left: None) -> None:
    engine = zero.init_inference(logits(), zero=zero_block("nvme", nvme_path))
    engine.generate(tokens(0))
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="the engine is closed"):
        engine(tokens(0))


def test_its_config_is_the_models(infer: Open) -> None:
    """Pipelines read `model.config.problem_type`, `id2label` or `eos_token_id` of what they are given."""
    model = logits()
    assert infer(model, "cpu").config is None
    other = logits()
    other.config = object()
    assert infer(other, "cpu").config is other.config
