"""Weights as codes: what is decoded is within half a step, and an engine computes what plain torch does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import seeded
from torch import Tensor, nn

import zero
from offload.errors import ConfigError
from zero.assembly.log import format_count
from zero.config.quantization_block import Codes
from zero.engine.quantization import quantize
from zero.params.quantized_weights import QuantizedLinear, decode, encode
from zero.params.units import coded_numel, collect_leaves

Open = Callable[..., Any]
ALL = [
    Codes(num_bits, group_size, group_dim, symmetric)
    for num_bits in (4, 8)
    for group_size in (8, 32)
    for group_dim in (0, 1)
    for symmetric in (False, True)
]


def steps_of(codes: Codes, steps: Tensor) -> Tensor:
    """The step of each element."""
    return steps.float().repeat_interleave(codes.group_size, codes.group_dim)


@pytest.mark.parametrize("codes", ALL, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_what_is_decoded_is_within_half_a_step(codes: Codes, scale: float) -> None:
    with seeded(0):
        weight = torch.randn(64, 96) * scale
        weight[3] = 0.0  # groups without a step
        weight[32:40, 32:64] = 0.37 * scale
    packed, steps, least = encode(weight, codes)
    assert packed.shape == (64, 96 * codes.num_bits // 8) and packed.dtype == torch.uint8
    assert steps.shape == codes.group_shape(64, 96) and (least is None) == codes.symmetric
    decoded = decode(packed, steps, least, codes, torch.float32)
    # Half a step, and what fp32 rounds in the division, the product and the sum.
    rounding = 4 * torch.finfo(torch.float32).eps * weight.abs().max()
    assert bool(((decoded - weight).abs() <= 0.5 * steps_of(codes, steps) + rounding).all())
    # The steps are no larger than the range of a group asks for, but for fp16's rounding upwards.
    span = weight.abs().max() * (1 if codes.symmetric else 2) / ((codes.half - 1) if codes.symmetric else codes.largest)
    assert float(steps.max()) <= float(span) * (1 + 2**-9) + 2**-23


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=8, max_size=8), st.sampled_from([4, 8]), st.booleans())
def test_any_group_is_enclosed_by_its_codes(values: list[float], num_bits: int, symmetric: bool) -> None:
    codes = Codes(num_bits, 8, 1, symmetric)
    weight = torch.tensor([values])
    packed, steps, least = encode(weight, codes)
    error = (decode(packed, steps, least, codes, torch.float32) - weight).abs()
    rounding = 4 * torch.finfo(torch.float32).eps * weight.abs().max()
    assert bool((error <= 0.5 * steps_of(codes, steps) + rounding).all())


@pytest.mark.parametrize("num_bits", [4, 8])
def test_every_code_survives_packing(num_bits: int) -> None:
    codes = Codes(num_bits, 2**num_bits, 1)
    weight = torch.arange(2**num_bits).float().repeat(3, 1)
    assert torch.equal(decode(*encode(weight, codes), codes, torch.float32), weight)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e8])
def test_a_value_that_cannot_be_coded_is_refused(value: float) -> None:
    weight = torch.zeros(2, 8)
    weight[1, 3] = value
    with pytest.raises(ConfigError, match="to be quantised"):
        encode(weight, Codes(8, 8))


def test_rows_are_decoded_in_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeded(0):
        weight = torch.randn(64, 64)
    for codes in ALL:
        coded = encode(weight, codes)
        whole = decode(*coded, codes, torch.bfloat16)
        monkeypatch.setattr("zero.params.quantized_weights.CHUNK_NUMEL", 200)
        assert torch.equal(decode(*coded, codes, torch.bfloat16), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_a_linear_with_the_decoded_weight(bias: bool) -> None:
    with seeded(0):
        linear = nn.Linear(64, 32, bias=bias)
        x = torch.randn(3, 5, 64)
    coded = QuantizedLinear.from_linear(linear, Codes(4, 32))
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        twin.weight.copy_(coded.weight)
    gradients = []
    for layer in (coded, twin):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        gradients.append((y.detach(), given.grad, None if layer.bias is None else layer.bias.grad))
        linear.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- with an engine ----------------------------------------------------------------------------


class Small(nn.Module):
    """Two blocks, a table that the head shares, and a layer whose shape no group fits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.odd = nn.Linear(64, 30)
        self.back = nn.Linear(30, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + self.back(self.odd(x)))


RULE = {"num_bits": 4, "group_size": 32}
CODED = ("packed", "steps", "least")
TOKENS = torch.arange(24).view(2, 12)


def small() -> Small:
    with seeded(0):
        return Small()


def inference_block(tier: str, path: Any) -> dict[str, Any]:
    where = {"device": tier} | ({"nvme_path": str(path)} if tier == "nvme" else {})
    return {} if tier == "none" else {"offload_param": where}


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_inference_gives_the_bits_of_plain_torch_with_the_same_codes(tier: str, num_bits: int, nvme_path: Any) -> None:
    plain = small().eval()
    codes = Codes(num_bits, 32)
    names = quantize(plain, {"": codes})
    assert names == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "odd"]
    with torch.no_grad():
        wanted = plain(TOKENS)
    rules = {"quantized_initialization": {"num_bits": num_bits, "group_size": 32}}
    engine = zero.init_inference(small(), zero=inference_block(tier, nvme_path), weight_quantization=rules)
    with engine:
        assert torch.equal(engine(TOKENS), wanted)


def test_a_cast_leaves_codes_and_their_steps_as_they_are(nvme_path: Any) -> None:
    """A model that was quantised before, or read with a format of its own, whose storage may have any dtype."""
    model = small().eval()
    quantize(model, {"": Codes(8, 32)})
    coded = {name: value.clone() for name, value in model.named_parameters() if name.rpartition(".")[2] in CODED}
    assert coded
    with zero.init_inference(model, zero=inference_block("cpu", nvme_path), dtype=torch.bfloat16) as engine:
        found = dict(engine.named_full_parameters())
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in coded.items()
        )


def test_a_forward_reads_the_codes_and_not_the_weights(nvme_path: Any) -> None:
    block = {**inference_block("nvme", nvme_path), "stage3_max_live_parameters": 600_000}
    block |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    read, x = {}, torch.ones(1, 512)
    for quantization in (None, {"quantized_initialization": RULE}):
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(12)])
        with zero.init_inference(model, zero=block, weight_quantization=quantization) as engine:
            engine(x)
            before = engine.statistics().nvme_read_bytes
            engine(x)
            read[quantization is not None] = engine.statistics().nvme_read_bytes - before
            if quantization is not None:  # half a byte a weight, and two numbers of fp16 for each 32
                assert sum(unit.nbytes for unit in engine.units) == 12 * 512 * 512 * (1 / 2 + 4 / 32)
    assert 0 < read[True] <= 12 * 512 * 512 * (1 / 2 + 4 / 32)
    assert read[True] < read[False] / 5


@pytest.mark.parametrize("where", ["memory", "init", "checkpoint"])
def test_weights_become_codes_wherever_they_are(where: str, nvme_path: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain = small().eval()
    saved = {name: value.contiguous() for name, value in plain.state_dict().items() if name != "head.weight"}
    save_file(saved, tmp_path / "model.safetensors")
    quantize(plain, {"blocks": Codes(4, 32)})
    with torch.no_grad():
        wanted = plain(TOKENS)
    config = {"zero": inference_block("nvme", nvme_path), "weight_quantization": {"post_init_quant": {"blocks": RULE}}}
    if where == "memory":
        model: nn.Module = small()
    else:
        training = {"zero_optimization": {"stage": 3, **inference_block("nvme", nvme_path)}}
        with zero.Init(config_dict_or_path=training), seeded(0):
            model = Small()
    if where == "checkpoint":
        config["checkpoint"] = str(tmp_path)
    with zero.init_inference(model, config) as engine:
        assert torch.equal(engine(TOKENS), wanted)


class Adapted(nn.Module):
    """A frozen model and something to train before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = small()
        self.base.requires_grad_(False)
        self.before, self.after = nn.Parameter(torch.zeros(64)), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        base = self.base
        x = base.table(tokens) + self.before
        for block in base.blocks:
            x = x + block(x)
        return self.after(x).square().mean()


def adapted() -> Adapted:
    with seeded(1):
        return Adapted()


def training_config(tier: str, nvme_path: Any) -> dict[str, Any]:
    where = {"device": tier} | ({"nvme_path": str(nvme_path)} if tier == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": dict(where)},
        "weight_quantization": {"post_init_quant": {"base.blocks": RULE}},
    }


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(TOKENS)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_frozen_base_of_codes_trains_what_is_around_it_as_plain_torch_does(
    tier: str, nvme_path: Any, open_engine: Open, tmp_path: Path
) -> None:
    plain = adapted()
    quantize(plain, {"base.blocks": Codes(4, 32)})
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    wanted = []
    for _ in range(6):
        loss = plain(TOKENS)
        wanted.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    engine = open_engine(adapted(), training_config(tier, nvme_path))
    assert train(engine, 3) == pytest.approx(wanted[:3], rel=1e-6)
    engine.save_checkpoint(tmp_path)
    codes = {name: value.clone() for name, value in engine.named_full_parameters() if "packed" in name}
    assert len(codes) == 4 and all(value.dtype == torch.uint8 for value in codes.values())
    engine.close()
    again = open_engine(adapted(), training_config("cpu", nvme_path))
    again.load_checkpoint(tmp_path)
    assert train(again, 3) == pytest.approx(wanted[3:], rel=1e-6)
    assert all(torch.equal(value, codes[name]) for name, value in again.named_full_parameters() if name in codes)


def test_codes_count_as_the_elements_that_they_stand_for(
    nvme_path: Any, open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    plain = adapted()
    total = sum(parameter.numel() for parameter in plain.parameters())
    with caplog.at_level("INFO", "zero"):
        open_engine(plain, training_config("cpu", nvme_path))
    (line,) = [text for text in caplog.messages if text.startswith("zero: ") and " parameters, " in text]
    assert line.startswith(f"zero: {format_count(total)} parameters, ")
    (table,) = [text for text in caplog.messages if text.startswith("what is kept in which dtype")]
    rows = [row.split() for row in table.splitlines() if row.split()[0] in ("trained", "frozen")]
    assert {row[2]: row[1] for row in rows if row[0] == "frozen"} == {
        "fp32": "8,670",
        "codes": "65,536",
        "fp16": "4,096",
    }


def test_codes_of_bitsandbytes_count_as_their_state_says() -> None:
    codes = nn.Parameter(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    codes.quant_state = SimpleNamespace(shape=torch.Size((8, 16)))  # type: ignore[attr-defined]
    layer = nn.Module()
    layer.weight, layer.bias = codes, nn.Parameter(torch.zeros(8))
    assert coded_numel(collect_leaves(layer)) == {0: 128}


def test_backward_keeps_codes_and_no_decoded_weight() -> None:
    model = adapted()
    quantize(model, {"base.blocks": Codes(4, 32)})
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(TOKENS)
    shapes = {tuple(t.shape) for t in saved}
    assert (256, 32) in shapes and (256, 64) not in shapes


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"after": RULE}, "is trained"),
        ({"nowhere": RULE}, "'nowhere'"),
        ({"base.blocks": {"num_bits": 3}}, "num_bits of 4 or 8"),
        ({"base.blocks": {"num_bits": 4, "group_size": 48}}, "does not divide"),
        ({"base.blocks": {"bits": 4}}, "one of the keys num_bits, group_size, group_dim, symmetric, not 'bits'"),
        ({"base.table": RULE}, "'base.table'"),
    ],
)
def test_what_cannot_be_codes_is_refused_by_name(
    rules: dict[str, Any], problem: str, nvme_path: Any, open_engine: Open
) -> None:
    config = {**training_config("none", nvme_path), "weight_quantization": {"post_init_quant": rules}}
    with pytest.raises(ConfigError, match=problem):
        open_engine(adapted(), config)


@pytest.mark.parametrize(
    ("quant", "bits"),
    [
        ({"enabled": True, "weight": {"num_bits": 4}}, 4),
        ({"weight": {"num_bits": 8, "q_type": "asymmetric"}}, 8),
        (True, 8),
        ({"enabled": False}, 0),
        ({"weight": {"enabled": False}}, 0),
    ],
)
def test_deepspeeds_quant_block_codes_every_linear_weight(quant: Any, bits: int) -> None:
    with zero.init_inference(nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 8)), quant=quant) as engine:
        found = [module.codes.num_bits for module in engine.module.modules() if isinstance(module, QuantizedLinear)]
        assert found == ([bits] if bits else [])  # groups of 128 fit the first
    with pytest.raises(ConfigError, match="activation"):
        zero.init_inference(nn.Linear(8, 8), quant={"activation": {"enabled": True}})


def test_a_block_that_codes_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of 24 are no whole number of groups of 128."""
    zero.init_inference(nn.Sequential(nn.Linear(24, 24)), {"quant": {"weight": {"num_bits": 8}}}).close()
    (text,) = [text for text in caplog.messages if "no weight is kept as codes" in text]
    assert "group_size" in text


def test_a_quantised_model_generates(nvme_path: Any) -> None:
    pytest.importorskip("transformers")
    from generating import generated, llama

    plain = llama()
    quantize(plain, {"proj": Codes(8, 32)})
    wanted = generated(plain, "greedy")
    rules = {"post_init_quant": {"proj": {"num_bits": 8, "group_size": 32}}}
    with zero.init_inference(llama(), zero=inference_block("nvme", nvme_path), weight_quantization=rules) as engine:
        assert torch.equal(generated(engine, "greedy"), wanted)


def wrapped_by_peft() -> Any:
    """The first of two layers has an adapter around it."""
    peft = pytest.importorskip("peft")
    with seeded(0):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return peft.get_peft_model(layers, peft.LoraConfig(r=4, target_modules=["0"]))


def test_an_adapter_is_not_merged_into_codes() -> None:
    model = wrapped_by_peft()
    quantize(model, {"0.base_layer": Codes(num_bits=4, group_size=16)})
    before = model(torch.ones(1, 64))
    with pytest.raises(ConfigError, match=r"0\.base_layer is kept as codes.*save the adapter alone"):
        model.merge_and_unload()
    assert torch.equal(model(torch.ones(1, 64)), before)


def test_layers_that_are_codes_when_another_cannot_be_are_told() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data[3, 4] = torch.inf
    with pytest.raises(
        ConfigError,
        match="inf or NaN; 1 layers before it have already been converted to codes, so build the model again",
    ):
        quantize(model, {"0": Codes(num_bits=4, group_size=16), "1": Codes(num_bits=4, group_size=16)})


def test_a_rule_that_names_a_wrapped_layer_codes_its_base_and_leaves_the_adapter() -> None:
    model = wrapped_by_peft()
    quantize(model, {"0": Codes(num_bits=4, group_size=16)})
    coded = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert coded == ["base_model.model.0.base_layer"]
