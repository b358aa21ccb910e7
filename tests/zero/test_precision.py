"""What is kept and computed in which dtype: fp16 weights, autocast, accumulation, and the table that says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HYPER, reference_of, unequal
from models import ADAMW, VOCAB, build, make_config, tokens, trainability
from pairwise import in_pairs
from reference import LossScaleRule, Reference, differences, snapshot
from torch import Tensor, nn

import zero
from offload.errors import ConfigError
from zero.checkpoint.export import convert_zero_checkpoint_to_state_dict, get_fp32_state_dict_from_zero_checkpoint
from zero.config import load_config

Open = Callable[..., Any]
TIERS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"))


def configured(pair: tuple[str, str], nvme_path: Any, **more: Any) -> dict[str, Any]:
    return make_config(pair, nvme_path, bf16=more.pop("bf16", False), **more)


def fp16(pair: tuple[str, str], nvme_path: Any, **more: Any) -> dict[str, Any]:
    return configured(pair, nvme_path, fp16={"enabled": True, "initial_scale_power": 8}, **more)


def one_step(trainer: Any, index: int, factor: float = 1.0) -> None:
    trainer.backward(trainer(tokens(index)) * factor)
    trainer.step()


# ---- fp16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", TIERS)
def test_each_step_of_fp16_training_is_as_near_to_torchs_as_its_rounding_allows(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    """Half weights, fp32 masters, torch's AdamW on those: the loop that everybody writes.

    The loops begin each step with the same bits, so they have the same gradients, and differ by what is rounded in the
    update: some 16 operations, none of which is wrong by more than 2^-24 of a gradient of at most 1/sqrt(1-beta2) < 4.5
    times the root of the second moment, summed up over 1/(1-beta1) = 10 steps: less than lr * 2^-14. And the master is
    rounded when it decays and when it changes: less than 2^-22 of it.
    """
    model, scale, lr = build("gpt").half(), 2.0**8, float(ADAMW["lr"])  # type: ignore[arg-type]
    masters = {name: torch.zeros_like(p, dtype=torch.float32).requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    engine = open_engine(build("gpt"), configured(pair, nvme_path, fp16={"enabled": True, "loss_scale": scale}))
    for index in range(6):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                masters[name].copy_(engine.full_master(name))
                weight.copy_(engine.full_parameter(name))
                assert torch.equal(weight, masters[name].half())
                state = engine.full_state(name)
                optimizer.state[masters[name]] = {**state, "step": torch.tensor(float(state["step"]))}
        (model(tokens(index)) * scale).backward()
        for name, weight in model.named_parameters():
            masters[name].grad, weight.grad = weight.grad.float() / scale, None  # type: ignore[union-attr]
        optimizer.step()
        one_step(engine, index)
        for name, master in masters.items():
            distance = (engine.full_master(name) - master.detach()).abs()
            assert (distance <= lr * 2.0**-14 + master.detach().abs() * 2.0**-22).all(), name


@pytest.mark.parametrize(("stage", "pair"), [(0, TIERS[0]), *((3, pair) for pair in TIERS)])
def test_fp16_weights_train_without_the_block_as_with_a_scale_of_one(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture, stage: int, pair: tuple[str, str]
) -> None:
    zero_keys = {"stage": stage}
    block = {"enabled": True, "loss_scale": 1.0}
    with_block = open_engine(build("gpt"), configured(pair, nvme_path, fp16=block, zero=zero_keys))
    assert not any("loss scale" in message for message in caplog.messages)
    without = open_engine(build("gpt").half(), configured(pair, nvme_path, zero=zero_keys))
    said = [message for message in caplog.messages if "without a loss scale" in message]
    assert len(said) == 1 and '"fp16": {"enabled": true}' in said[0]
    for name, _ in without.named_full_parameters():  # else masters begin with more digits than the fp16 weights
        values = set_master(with_block, name, without.full_master(name))
        assert torch.equal(values, without.full_master(name)) and without.full_parameter(name).dtype == torch.float16
    for index in range(3):
        one_step(with_block, index)
        one_step(without, index)
    names = trainability(build("gpt"))
    assert differences(snapshot(without, names), snapshot(with_block, names)) == []


def set_master(engine: Any, name: str, value: Tensor) -> Tensor:
    zero.utils.safe_set_full_fp32_param(engine.module.get_parameter(name), value)
    return engine.full_master(name)  # type: ignore[no-any-return]


@in_pairs(pair=TIERS, clipping=(0.0, 0.3), accumulation=(1, 2))
def test_a_checkpoint_of_fp16_weights_gives_masters_weights_and_moments_back(
    open_engine: Open, nvme_path: Path, tmp_path: Path, pair: tuple[str, str], clipping: float, accumulation: int
) -> None:
    keys = {"clipping": clipping, "accumulation": accumulation}
    engine = open_engine(build("gpt"), fp16(pair, nvme_path, **keys))
    for index in range(3 * accumulation):
        one_step(engine, index)
    engine.save_checkpoint(tmp_path / "saved")
    for where in TIERS:
        other = open_engine(build("gpt", seed=1), fp16(where, nvme_path, **keys))
        other.load_checkpoint(tmp_path / "saved")
        assert unequal(engine, other) == []
    exact = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    convert_zero_checkpoint_to_state_dict(tmp_path / "saved", tmp_path / "out", "fp16")
    from safetensors.torch import load_file

    halves = load_file(tmp_path / "out" / "model.safetensors")
    for name, _ in trainability(build("gpt")):
        assert torch.equal(exact[name], engine.full_master(name))
        assert torch.equal(halves[name], engine.full_parameter(name))
        assert halves[name].dtype == torch.float16


@pytest.mark.parametrize("pair", TIERS)
def test_a_master_follows_an_edit_where_the_weight_changed_and_nowhere_else(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    model = build("gpt")
    engine = open_engine(model, fp16(pair, nvme_path))
    one_step(engine, 0)
    name = "blocks.1.up.weight"
    before = engine.full_master(name)
    assert (before != before.half().float()).any(), "otherwise there is nothing to keep"
    with zero.GatheredParameters([model.get_parameter(name)], modifier_rank=0), torch.no_grad():
        model.get_parameter(name)[:3] = 0.1
    after = engine.full_master(name)
    assert torch.equal(after[3:], before[3:])
    assert torch.equal(after[:3], torch.full_like(after[:3], 0.1).half().float())


@pytest.mark.parametrize("pair", TIERS)
def test_a_model_built_under_init_has_the_masters_it_would_have_had_without(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    config = fp16(pair, nvme_path)
    with zero.Init(config_dict_or_path=config):
        model = build("gpt")
    one, other = open_engine(model, config), open_engine(build("gpt"), config)
    for trainer in (one, other):
        one_step(trainer, 0)
    assert unequal(one, other) == []


def test_masters_take_four_bytes_more_than_the_weights(open_engine: Open, nvme_path: Path) -> None:
    """bf16 with its remainder 2 + 2 + 8 bytes a parameter on NVMe, fp16 2 + 4 + 8."""
    totals = {}
    for name, config in {
        "bf16": configured(("nvme", "nvme"), nvme_path, bf16=True),
        "fp16": fp16(("nvme", "nvme"), nvme_path),
    }.items():
        engine = open_engine(build("gpt"), config)
        totals[name] = {row.array: row.nbytes for row in engine.plan.rows if row.tier == "nvme"}
        numel = sum(unit.numel for unit in engine.units)
    assert totals["bf16"] == {"weights": 2 * numel, "optimizer states": 10 * numel}
    assert totals["fp16"] == {"weights": 2 * numel, "optimizer states": 12 * numel}


class Casts(nn.Module):
    """Says what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, more: dict[str, Any], *, named: Tensor) -> Tensor:
        self.seen = [x.dtype, more["inner"][0].dtype, more["ids"].dtype, named.dtype]
        return (self.scale * x).float().sum()


@pytest.mark.parametrize("wish", [True, False])
def test_auto_cast_casts_floating_positional_inputs(open_engine: Open, nvme_path: Path, wish: bool) -> None:
    model = Casts()
    config = configured(("cpu", "cpu"), nvme_path, fp16={"enabled": True, "auto_cast": wish})
    engine = open_engine(model, config)
    wide, ids = torch.ones(4), torch.ones(4, dtype=torch.int64)
    engine(wide, {"inner": [wide], "ids": ids}, named=wide)
    cast = torch.float16 if wish else torch.float32
    assert model.seen == [cast, cast, torch.int64, torch.float32]


def test_weights_that_come_in_bf16_are_warned_of(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zero"):
        open_engine(build("gpt").bfloat16(), fp16(("cpu", "cpu"), nvme_path))
    assert "are in bf16, and fp16 cannot hold all of its range" in caplog.text


# ---- autocast ---------------------------------------------------------------------------------


class UnderAutocast(Reference):
    """The reference whose forward runs under torch.autocast."""

    cast = torch.bfloat16

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", self.cast, cache_enabled=False):
            return self.model(*inputs, **named)


@pytest.mark.parametrize("pair", TIERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_under_autocast_is_bit_equal_to_torchs(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], dtype: str
) -> None:
    """fp32 weights; with fp16 the loss is scaled as torch.amp.GradScaler does."""
    config = configured(pair, nvme_path, torch_autocast={"enabled": True, "dtype": dtype}, clipping=0.3)
    engine = open_engine(build("gpt"), config)
    rule = LossScaleRule(2.0**16, 2000, 1, minimum=0.0) if dtype == "float16" else None
    reference = UnderAutocast(build("gpt"), lambda name: HYPER, bf16=False, rule=rule, clipping=0.3)
    reference.cast = getattr(torch, dtype)
    for index in range(5):
        one_step(engine, index, math.inf if rule and index == 1 else 1.0)
        one_step(reference, index, math.inf if rule and index == 1 else 1.0)
    assert engine.optimizer.cur_scale == (2.0**15 if rule else 1.0)
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert unequal(engine, reference) == []
    assert engine.full_parameter("head.weight").dtype == torch.float32
    plain = reference_of(bf16=False, clipping=0.3)
    for index in range(5):
        one_step(plain, index)
    assert unequal(engine, plain) != [], "otherwise nothing was cast"


@pytest.mark.parametrize("cache", [True, False])
def test_the_users_own_autocast_around_the_engine_does_the_same(
    open_engine: Open, nvme_path: Path, cache: bool
) -> None:
    block = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
    ours = open_engine(build("gpt"), configured(("nvme", "nvme"), nvme_path, **block))
    users = open_engine(build("gpt"), configured(("nvme", "nvme"), nvme_path))
    for index in range(4):
        one_step(ours, index)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            one_step(users, index)
    assert unequal(ours, users) == []


# ---- accumulation -----------------------------------------------------------------------------


class NarrowSums(Reference):
    """The reference that adds gradients up in 16 bits."""

    def _contribute(self, name: str, parameter: Tensor) -> None:
        new, held = parameter.grad, self.grads.get(name)
        assert new is not None
        self.grads[name] = new.detach().clone() if held is None else (held.float() + new.float()).to(new.dtype)
        parameter.grad = None


@in_pairs(pair=TIERS, accumulation=(1, 3), backwards=(1, 2), half=("bf16", "fp16"))
def test_gradients_are_added_up_in_16_bits_where_the_configuration_says_so(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], accumulation: int, backwards: int, half: str
) -> None:
    keys = {"accumulation": accumulation, "data_types": {"grad_accum_dtype": half}}
    config = configured(pair, nvme_path, bf16=half == "bf16", **keys)
    if half == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 256}
    engine = open_engine(build("gpt"), config)
    rule = LossScaleRule(256.0, 10**6, 1) if half == "fp16" else None
    reference = NarrowSums(
        build("gpt"),
        lambda name: HYPER,
        fp16=half == "fp16",
        rule=rule,
        accumulation=accumulation,
    )
    for trainer in (engine, reference):
        for index in range(3 * accumulation):
            for again in range(backwards):
                trainer.backward(trainer(tokens(2 * index + again)))
            trainer.step()
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert unequal(engine, reference) == []
    rows = {(row.tier, row.array): row.nbytes for row in engine.plan.rows}
    held = sum(nbytes for (_, plane), nbytes in rows.items() if plane == "gradients")
    assert held == 2 * sum(unit.numel for unit in engine.units)


@pytest.mark.parametrize(("bf16", "asked"), [(True, "fp16"), (False, "bf16")])
def test_a_dtype_of_sums_that_is_not_the_weights_is_fp32_and_is_told(
    open_engine: Open, nvme_path: Path, bf16: bool, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = []
    for keys in ({}, {"data_types": {"grad_accum_dtype": asked}}):
        with caplog.at_level(logging.WARNING, "zero"):
            engine = open_engine(build("gpt"), configured(("cpu", "cpu"), nvme_path, bf16=bf16, accumulation=2, **keys))
        told = [message for message in caplog.messages if message.startswith("data_types.grad_accum_dtype")]
        assert told == [f"data_types.grad_accum_dtype: {asked} is only used with {asked}.enabled; "
                        "gradients are accumulated in fp32"] * len(keys)  # fmt: skip
        for index in range(4):
            one_step(engine, index)
        held.append(snapshot(engine, trainability(build("gpt"))))
    assert differences(*held) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, "torch_autocast.dtype"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale"),
        ({"amp": {"enabled": True}}, "torch_autocast"),
    ],
)
def test_precisions_that_contradict_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(given)


# ---- buffers ----------------------------------------------------------------------------------


class Routed(nn.Module):
    """Picks an output by scores to which a buffer is added, as DeepSeek-V3 does; and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8)
        self.inner = nn.Linear(8, 8)
        self.norm, self.bare = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)
        self.register_buffer("correction", torch.tensor([1.0, 1.001, 1.002, 1.003, 1.0005, 0.0, 0.0, 0.0]))
        self.register_buffer("passing", torch.linspace(0, 1, 5), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("codes", torch.arange(4, dtype=torch.float32))

    def forward(self, text: Tensor) -> Tensor:
        x = self.norm(self.bare(self.inner(self.table(text).flatten(0, 1))))
        self.promoted = (x + self.correction).dtype
        self.best = self.correction.argmax()
        return (x[:, self.best] ** 2).mean()


BUFFERS = {
    "correction": torch.float32,
    "passing": torch.float32,
    "count": torch.int64,
    "codes": torch.float32,
    "norm.running_mean": torch.float32,
    "norm.running_var": torch.float32,
    "norm.num_batches_tracked": torch.int64,
    "bare.running_mean": torch.float32,
    "bare.running_var": torch.float32,
    "bare.num_batches_tracked": torch.int64,
}


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_keep_their_dtype_but_the_statistics_of_a_norm_whose_weights_are_16_bit(
    open_engine: Open, nvme_path: Path, tmp_path: Path, precision: str
) -> None:
    config = {**configured(("cpu", "cpu"), nvme_path), precision: {"enabled": True}}
    engine = open_engine(Routed(), config)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    expected = {**BUFFERS, "norm.running_mean": half, "norm.running_var": half}
    assert dtypes_of(engine.module) == expected
    before = Routed()
    assert torch.equal(engine.module.correction, before.correction)
    one_step(engine, 0)
    assert engine.module.best == 3, "rounded to 16 bits, four of the values are one"
    assert engine.module.promoted == torch.float32
    assert engine.module.bare.running_mean.abs().sum() > 0
    held = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.save_checkpoint(tmp_path / "saved")
    other = open_engine(Routed(), config)
    other.load_checkpoint(tmp_path / "saved")
    assert dtypes_of(other.module) == expected
    kept = other.module.state_dict().keys()
    assert all(torch.equal(b, held[name]) for name, b in other.module.named_buffers() if name in kept)


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), ("torch.float16", torch.float16)])
def test_floating_buffers_take_the_dtype_that_the_configuration_names(
    open_engine: Open, nvme_path: Path, asked: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**configured(("none", "none"), nvme_path, bf16=True), "data_types": {"buffer_dtype": asked}}
    with caplog.at_level(logging.INFO, "zero"):
        engine = open_engine(Routed(), config)
    expected = {name: dtype if kept.is_floating_point else kept for name, kept in BUFFERS.items()}
    assert dtypes_of(engine.module) == expected
    assert f"floating buffers: {'bf16' if asked == 'bf16' else 'fp16'}" in caplog.text


def test_without_16_bit_weights_a_dtype_of_buffers_has_no_effect(open_engine: Open, nvme_path: Path) -> None:
    config = {**configured(("none", "none"), nvme_path), "data_types": {"buffer_dtype": "bf16"}}
    assert load_config(config).inactive == ("data_types.buffer_dtype",)
    assert dtypes_of(open_engine(Routed(), config).module) == BUFFERS


def test_inference_leaves_buffers_as_they_are() -> None:
    with zero.init_inference(Routed(), dtype="bf16") as engine:
        assert engine.module.correction.dtype == engine.module.passing.dtype == torch.float32
        assert engine.module.norm.running_mean.dtype == torch.bfloat16
        assert engine(tokens(0)).isfinite()
        assert engine.module.best == 3


@pytest.mark.parametrize("named", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_of_parameters_may_say_what_holds_anyway(named: str) -> None:
    assert load_config({"bf16": {"enabled": True}, "data_types": {"param_dtype": named}}).inactive == ()
    with pytest.raises(ConfigError, match=r"data_types.param_dtype: expected the dtype .* got \"bf16\""):
        load_config({"fp16": {"enabled": True}, "data_types": {"param_dtype": named}})


# ---- gradients that are not finite, without a loss scale --------------------------------------


@pytest.mark.parametrize("bf16", [True, False])
def test_without_fp16_a_step_with_gradients_that_are_not_finite_is_skipped_too(
    open_engine: Open, nvme_path: Path, bf16: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(build("gpt"), configured(("cpu", "cpu"), nvme_path, bf16=bf16))
    one_step(engine, 0)
    held = snapshot(engine, trainability(build("gpt")))
    with caplog.at_level(logging.WARNING, "zero"):
        one_step(engine, 1, math.nan)
    assert "step 2 is skipped: the loss and the gradients of head.weight, " in caplog.text
    assert "loss scale" not in caplog.text
    assert engine.skipped_steps == 1 and engine.optimizer.overflow and engine.get_global_grad_norm() == math.inf
    assert differences(snapshot(engine, trainability(build("gpt"))), held) == []


def test_with_bf16_it_is_taken_where_the_configuration_says_so(open_engine: Open, nvme_path: Path) -> None:
    config = configured(("cpu", "cpu"), nvme_path)
    config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    engine = open_engine(build("gpt"), config)
    one_step(engine, 0, math.nan)
    assert engine.skipped_steps == 0 and engine.was_step_applied()
    assert engine.full_parameter("head.weight").isnan().all()


# ---- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "line", "notes"),
    [
        (
            {"bf16": True},
            "trained bf16 fp32 = bf16 + 16 bits bf16 fp32 - fp32",
            ["floating buffers: as the model has them"],
        ),
        ({}, "trained fp32 the weights fp32 fp32 - fp32", ["as the model has them"]),
        (
            {"fp16": {"enabled": True}, "accumulation": 2},
            "trained fp16 fp32 fp32 fp32 - fp32",
            ["loss scale: dynamic, from 65536"],
        ),
        (
            {"bf16": True, "data_types": {"grad_accum_dtype": "bf16"}, "accumulation": 2},
            "trained bf16 fp32 = bf16 + 16 bits bf16 bf16 - fp32",
            [],
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "clipping": 0.5},
            "trained fp32 the weights fp32 fp32 - fp32",
            ["forward under torch.autocast: fp16", "loss scale: dynamic, from 65536", "clipped to a norm of 0.5"],
        ),
        (
            {"bf16": True, "zero": {"offload_optimizer": {"state_dtype": "8bit"}}},
            "trained bf16 fp32 = bf16 + 16 bits bf16 fp32 - 8-bit blocks",
            ["inf or NaN: skipped", "gradients are not clipped"],
        ),
    ],
)
def test_a_table_of_dtypes_is_printed_at_start(
    open_engine: Open,
    nvme_path: Path,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
    line: str,
    notes: list[str],
) -> None:
    with caplog.at_level(logging.INFO, "zero"):
        engine = open_engine(build("gpt"), configured(("cpu", "cpu"), nvme_path, **more))
    (table,) = [text for text in caplog.messages if text.startswith("what is kept in which dtype")]
    (row,) = [" ".join(text.split()) for text in table.splitlines() if text.strip().startswith("trained")]
    numel = sum(parameter.numel() for parameter in build("gpt").parameters())
    assert row == line.replace("trained", f"trained {numel:,}")
    assert all(note in table for note in notes)
    assert engine.full_parameter("head.weight").dtype in (torch.float32, torch.bfloat16, torch.float16)


def test_a_mixed_model_has_a_line_for_each_dtype(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bf16 base that is not trained, and adapters in fp32."""
    model = build("lora")
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with caplog.at_level(logging.INFO, "zero"):
        open_engine(model, configured(("cpu", "cpu"), nvme_path))
    (table,) = [text for text in caplog.messages if text.startswith("what is kept in which dtype")]
    rows = [" ".join(text.split()) for text in table.splitlines()]
    assert f"frozen {frozen:,} bf16 - - - - -" in rows
    assert f"trained {trained:,} fp32 the weights fp32 fp32 - fp32" in rows


@pytest.mark.parametrize("pair", TIERS)
def test_an_exact_value_set_by_hand_is_the_one_that_is_read_and_its_half_the_one_that_is_used(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    from zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    model = build("gpt")
    engine = open_engine(model, fp16(pair, nvme_path))
    one_step(engine, 0)
    name = "blocks.1.up.weight"
    parameter = model.get_parameter(name)
    value = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / 3
    safe_set_full_fp32_param(parameter, value)
    assert torch.equal(safe_get_full_fp32_param(parameter), value)
    assert torch.equal(engine.full_master(name), value)
    assert torch.equal(engine.full_parameter(name), value.half())
