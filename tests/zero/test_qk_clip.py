"""QK-clip: after a step no head's attention logits exceed the threshold; what did not before is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters as held
from models import build, make_config
from qk_model import (
    HIDDEN,
    LARGER,
    MICRO_BATCHES,
    THRESHOLD,
    WIDTH,
    attention_of,
    config_of,
    factors_of,
    llama,
    logits_of,
    loss_of,
)

import zero
from offload.errors import ConfigError, StateError
from zero.engine.qk_clip import LOGITS_NUMEL, largest_logits
from zero.values.parameter_values import ParameterValues

pytest.importorskip("transformers")
PLACES = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"))
ROUNDINGS = 2 * HIDDEN + 4 * WIDTH + 16
"""Operations on the way to a logit, more than there are: two projections, a product, a norm, and a scaling."""
Open = Callable[..., Any]


def loaded(masters: dict[str, torch.Tensor], **of_model: Any) -> torch.nn.Module:
    model = llama(**of_model)
    model.load_state_dict({**model.state_dict(), **masters})
    return model


@pytest.mark.parametrize("pair", PLACES)
@pytest.mark.parametrize("of_model", [{}, {"key_heads": 2}, {"bias": False}], ids=str)
def test_no_logit_of_the_same_batch_exceeds_the_threshold_after_the_step(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], of_model: dict[str, Any]
) -> None:
    before, _ = logits_of(llama(**of_model), 0)
    assert all((each > THRESHOLD).tolist() == [True, True, False, False] for each in before), "what is tried is nothing"
    engine = open_engine(llama(**of_model), config_of(pair, nvme_path))
    engine.backward(loss_of(engine, 0))
    engine.step()
    masters = held(engine)
    # The first layer: what others are given is another input once the first one attends otherwise.
    (after, *_), (magnitudes, *_) = logits_of(loaded(masters, **of_model), 0)
    roundings = ROUNDINGS * 2.0**-24 * magnitudes
    assert bool((after <= THRESHOLD + roundings).all())
    assert bool((after[:2] >= THRESHOLD - roundings[:2]).all()), "no more than needed"
    plain = dict(llama(**of_model).named_parameters())
    kept = {
        name for name in plain if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
    }
    assert all(torch.equal(masters[name], plain[name]) for name in kept)
    for name in plain.keys() - kept:
        rows = 0 if "k_proj" in name and "key_heads" in of_model else HIDDEN // 2
        assert torch.equal(masters[name][rows:], plain[name][rows:]), f"{name}: rows of heads below the threshold"
        assert not rows or not torch.equal(masters[name][:rows], plain[name][:rows]) or not plain[name].any()


@pytest.mark.parametrize("pair", PLACES)
@pytest.mark.parametrize("bf16", [False, True])
def test_where_no_head_exceeds_the_threshold_training_is_what_it_is_without(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], bf16: bool
) -> None:
    ends = []
    for threshold in (None, 1e6):
        engine = open_engine(llama(), config_of(pair, nvme_path, threshold=threshold, lr=0.01, bf16=bf16))
        for index in range(3):
            engine.backward(loss_of(engine, index))
            engine.step()
        ends.append(held(engine))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("bf16", [False, True])
def test_every_place_gives_the_same_bits(open_engine: Open, nvme_path: Path, bf16: bool) -> None:
    ends = []
    persistent: dict[str, Any] = {"stage3_param_persistence_threshold": 100_000}
    for pair, zero_keys in (*((pair, {}) for pair in PLACES), (PLACES[-1], persistent)):
        config = config_of(pair, nvme_path, lr=0.01, bf16=bf16, accumulation=2, zero=zero_keys)
        engine = open_engine(llama(), config)
        for index in range(6):
            engine.backward(loss_of(engine, index))
            engine.step()
        ends.append(held(engine))
    assert all(torch.equal(end[name], ends[0][name]) for end in ends[1:] for name in ends[0])


def test_of_several_micro_batches_the_largest_logit_counts_and_evaluation_does_not(
    open_engine: Open, nvme_path: Path
) -> None:
    (one, other, evaluated) = (logits_of(llama(), index)[0][0][:2] for index in (*MICRO_BATCHES, LARGER))
    assert one[0] < other[0] < evaluated[0] and other[1] < one[1], "each of the three would give something else"
    engine = open_engine(llama(), config_of(("cpu", "cpu"), nvme_path, accumulation=2))
    engine.eval()
    loss_of(engine, LARGER)
    engine.train()
    for index in MICRO_BATCHES:
        engine.backward(loss_of(engine, index))
        engine.step()
    torch.testing.assert_close(
        factors_of(held(engine)), (THRESHOLD / torch.maximum(one, other)).sqrt(), rtol=1e-5, atol=0
    )


def test_a_checkpoint_amid_an_accumulation_has_the_logits_so_far(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    one, other = (logits_of(llama(), index)[0][0][:2] for index in MICRO_BATCHES)
    engine, resumed = (open_engine(llama(), config_of(PLACES[1], nvme_path, accumulation=2)) for _ in range(2))
    engine.backward(loss_of(engine, MICRO_BATCHES[0]))
    engine.step()
    engine.save_checkpoint(tmp_path)
    resumed.backward(loss_of(resumed, LARGER))
    resumed.load_checkpoint(tmp_path)
    resumed.backward(loss_of(resumed, MICRO_BATCHES[1]))
    resumed.step()
    wanted = (THRESHOLD / torch.maximum(one, other)).sqrt()
    torch.testing.assert_close(factors_of(held(resumed)), wanted, rtol=1e-5, atol=0)


def test_a_step_that_is_skipped_clips_nothing(open_engine: Open, nvme_path: Path) -> None:
    half = {"enabled": True, "initial_scale_power": 40}
    engine = open_engine(llama(), config_of(("cpu", "cpu"), nvme_path, fp16=half))
    before = held(engine)
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert engine.skipped_steps == 1
    assert all(torch.equal(master, before[name]) for name, master in held(engine).items())


def test_a_batch_that_fails_clips_nothing(open_engine: Open, nvme_path: Path) -> None:
    one, other = (logits_of(llama(), index)[0][0][:2] for index in MICRO_BATCHES)
    engine = open_engine(llama(), config_of(("cpu", "cpu"), nvme_path, accumulation=2))

    def failing(index: int) -> torch.Tensor:
        loss_of(engine, LARGER)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        engine.train_batch(iter(MICRO_BATCHES), failing)
    engine.train_batch(iter(MICRO_BATCHES), lambda index: loss_of(engine, index))
    wanted = (THRESHOLD / torch.maximum(one, other)).sqrt()
    torch.testing.assert_close(factors_of(held(engine)), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("call", "stores", "error"), [(2, False, OSError("the disk is full")), (1, True, KeyboardInterrupt("behind it"))]
)
def test_what_could_not_be_stored_or_was_interrupted_behind_it_is_clipped_by_the_next_call_and_once(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, stores: bool, error: BaseException
) -> None:
    """`call`: which one fails; `stores`: it has stored the values before."""
    ends = []
    for fails in (False, True):
        engine = open_engine(llama(), config_of(("cpu", "cpu"), nvme_path))
        engine.backward(loss_of(engine, 0))
        if fails:
            calls, stored = [], ParameterValues.set_master

            def set_master(
                values: ParameterValues, value: torch.Tensor, calls: Any = calls, stored: Any = stored
            ) -> None:
                calls.append(value)
                if len(calls) != call or stores:
                    stored(values, value)
                if len(calls) == call:
                    raise error

            monkeypatch.setattr(ParameterValues, "set_master", set_master)
            with pytest.raises(type(error), match=str(error)):
                engine.step()
        else:
            engine.step()
        ends.append(held(engine))
    assert all(torch.equal(ends[1][name], ends[0][name]) for name in ends[0])


@pytest.mark.parametrize("mask", ["none", "causal", "hidden", "added"])
def test_masked_logits_do_not_count_and_pieces_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 7, 4, generator=generator) for heads in (4, 2))
    logits = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) * 0.5
    seen = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    given = {"hidden": seen, "added": torch.zeros(1, 1, 7, 7).masked_fill(~seen, -torch.inf)}.get(mask)
    wanted = (logits if mask == "none" else logits.masked_fill(~seen, -torch.inf)).amax((0, 2, 3))
    assert logits.numel() < LOGITS_NUMEL
    for numel in (LOGITS_NUMEL, 2 * 2 * logits[..., 0, :].numel(), 1):
        monkeypatch.setattr("zero.engine.qk_clip.LOGITS_NUMEL", numel)
        torch.testing.assert_close(largest_logits(q, k, given, 0.5, causal=mask == "causal"), wanted)


class Own(torch.nn.Module):
    """Attention that is no transformers' one, of one head."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.tells = tells

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.q_proj(x) @ self.k_proj(x).T
        if self.tells:
            zero.observe_attention_logits(self, logits.max()[None])
        return (logits.softmax(-1) @ x).square().mean()


def test_a_model_of_ones_own_says_its_maxima(open_engine: Open, nvme_path: Path) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    model = Own(tells=True)
    before = float((model.q_proj(x) @ model.k_proj(x).T).max().detach())
    engine = open_engine(model, config_of(("cpu", "cpu"), nvme_path, threshold=before / 2))
    engine.backward(engine(x))
    engine.step()
    after = Own(tells=False)
    after.load_state_dict(held(engine))
    assert float((after.q_proj(x) @ after.k_proj(x).T).max().detach()) == pytest.approx(before / 2, rel=1e-5)


def test_a_model_that_says_nothing_is_told_so(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(Own(tells=False), config_of(("cpu", "cpu"), nvme_path))
    engine.backward(engine(torch.randn(5, 8)))
    with pytest.raises(StateError, match=r"no attention logit was seen.*zero\.observe_attention_logits"):
        engine.step()


def eager() -> torch.nn.Module:
    model = llama()
    model.config._attn_implementation = "eager"
    return model


def normed() -> torch.nn.Module:
    model = llama()
    attention_of(model)[1].q_norm = torch.nn.RMSNorm(WIDTH)
    return model


def frozen() -> torch.nn.Module:
    model = llama()
    attention_of(model)[0].k_proj.weight.requires_grad_(False)
    return model


def tied() -> torch.nn.Module:
    model = llama()
    one, other = attention_of(model)
    other.q_proj.weight = one.q_proj.weight
    return model


def fused() -> torch.nn.Module:
    model = Own(tells=True)
    model.qkv_proj = torch.nn.Linear(8, 24)
    return model


REFUSED = {
    eager: 'layers.0.self_attn.*the attention implementation is "eager".*set attn_implementation',
    normed: "layers.1.self_attn: q_norm cancels",
    frozen: "nn.Linear modules that are trained",
    tied: "shares its weight with another module",
    fused: "qkv_proj, which holds queries, keys and values",
    lambda: build("gpt"): "no module has q_proj and k_proj",
}


@pytest.mark.parametrize("make", REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_cannot_be_clipped_is_refused_by_name(open_engine: Open, nvme_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=REFUSED[make]):
        open_engine(make(), config_of(("cpu", "cpu"), nvme_path))


def test_other_optimizers_and_snapshots_are_refused(open_engine: Open, nvme_path: Path) -> None:
    block = {"type": "AdamW", "params": {"qk_clip": 100.0}}
    with pytest.raises(ConfigError, match=r"qk_clip.*it belongs to Muon"):
        open_engine(llama(), make_config(("cpu", "cpu"), nvme_path, optimizer=block))
    zero_block = {"offload_optimizer": {"snapshot": {"every": 2}}}
    with pytest.raises(ConfigError, match=r"snapshots do not allow weights to change between two steps"):
        open_engine(llama(), config_of(("nvme", "nvme"), nvme_path, zero=zero_block))
