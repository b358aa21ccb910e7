"""`bf16.bf16_master_weights_and_grads`: weights are their own masters, the same bits wherever they live."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens, trainability
from pairwise import in_pairs
from probe import layout_of
from ranks import RankPool
from ranks_runs import quiet
from reference import differences, snapshot
from torch import Tensor

from offload.errors import ConfigError
from zero.config import load_config
from zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

Open = Callable[..., Any]
Pool = Callable[[int], RankPool]
NVME = ("nvme", "nvme")
STEPS = 6
NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def config_of(pair: tuple[str, str], folder: Any, state_dtype: str = "bf16", **more: Any) -> dict[str, Any]:
    bf16 = {**NARROW, "bf16_optimizer_states": state_dtype == "bf16"}
    keys = {**more.pop("zero", {}), "offload_optimizer": {"state_dtype": state_dtype}}
    return make_config(pair, folder, zero=keys, bf16=bf16, **more)


def trained(engine: Any, first: int = 0, last: int = STEPS) -> Any:
    for index in range(first, last):
        named = {"branch": index} if hasattr(engine.module, "branch") else {}
        engine.backward(engine(tokens(index), **named))
        engine.step()
    return engine


@cache
def expected(state_dtype: str, model: str, clipping: float) -> dict[str, Tensor]:
    """What training on the device gives."""
    import zero

    config = config_of(("none", "none"), "", state_dtype, clipping=clipping)
    with zero.initialize(model=build(model), config=config)[0] as engine:
        return snapshot(trained(engine), trainability(build(model)))


@in_pairs(
    state_dtype=("fp32", "bf16", "8bit"),
    model=("gpt", "mixed", "branching"),
    pair=(("none", "cpu"), ("cpu", "none"), ("cpu", "nvme"), ("nvme", "cpu"), NVME),
    sub_group_numel=(4096, 10**9),
    clipping=(0.0, 0.3),
)
def test_where_they_live_and_how_they_are_cut_changes_no_bit(
    open_engine: Open,
    nvme_path: Path,
    state_dtype: str,
    model: str,
    pair: tuple[str, str],
    sub_group_numel: int,
    clipping: float,
) -> None:
    config = config_of(pair, nvme_path, state_dtype, zero={"sub_group_size": sub_group_numel}, clipping=clipping)
    ours = snapshot(trained(open_engine(build(model), config)), trainability(build(model)))
    assert differences(ours, expected(state_dtype, model, clipping)) == []


def test_a_weight_is_its_master_before_and_after_an_edit(open_engine: Open, nvme_path: Path) -> None:
    engine = trained(open_engine(build("gpt"), config_of(NVME, nvme_path)))
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if p.dim() == 2)
    master = safe_get_full_fp32_param(parameter)
    assert master is not None and master.dtype == torch.float32
    assert torch.equal(master, engine.full_parameter(name).float())
    value = torch.linspace(-1, 1, master.numel()).view(master.shape)
    safe_set_full_fp32_param(parameter, value)
    assert torch.equal(engine.full_parameter(name), value.bfloat16())
    assert torch.equal(safe_get_full_fp32_param(parameter), value.bfloat16().float())


def test_steps_too_small_for_rounding_to_nearest_still_move_weights(open_engine: Open, nvme_path: Path) -> None:
    """With a rate of 1e-5 every step is far below half a unit of most weights; on average they move all the same."""
    rate = {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}}
    engines = {
        "bf16": open_engine(build("gpt").bfloat16(), config_of(("cpu", "cpu"), nvme_path, optimizer=rate)),
        "fp32": open_engine(build("gpt").bfloat16(), make_config(("cpu", "cpu"), nvme_path, optimizer=rate)),
    }
    start = {name: p.detach().float() for name, p in build("gpt").bfloat16().named_parameters()}
    moved = {}
    for kind, engine in engines.items():
        trained(engine, 0, 20)
        masters = {name: engine.full_master(name) for name, _ in trainability(build("gpt"))}
        moved[kind] = torch.cat([(masters[name] - start[name]).flatten() for name in sorted(start)]).double()
    along = (moved["bf16"] @ moved["fp32"]) / (moved["fp32"] @ moved["fp32"])
    # An unbiased estimate of 1: its variance is that of the rounding, a unit's share of each step.
    noise = ((moved["bf16"] - moved["fp32"]) * moved["fp32"]).square().sum().sqrt() / (moved["fp32"] @ moved["fp32"])
    assert noise < 0.1 and abs(along - 1) <= 6 * noise
    still = (moved["bf16"] == 0).double().mean()
    assert 0.2 < still < 1, "most weights are meant to be too large for a step to be seen at once"


def test_a_checkpoint_goes_on_bit_for_bit_and_takes_or_gives_exact_masters(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    names = trainability(build("gpt"))
    engine = trained(open_engine(build("gpt"), config_of(NVME, nvme_path)), 0, 3)
    engine.save_checkpoint(tmp_path)
    saved = snapshot(engine, names)
    trained(engine, 3, 6)
    resumed = open_engine(build("gpt"), config_of(("cpu", "cpu"), nvme_path, zero={"sub_group_size": 4096}))
    resumed.load_checkpoint(tmp_path)
    assert differences(snapshot(trained(resumed, 3, 6), names), snapshot(engine, names)) == []
    exact = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path))
    exact.load_checkpoint(tmp_path)
    assert differences(snapshot(exact, names), saved) == []
    trained(exact, 3, 5).save_checkpoint(tmp_path / "exact")
    narrow = open_engine(build("gpt"), config_of(NVME, nvme_path))
    narrow.load_checkpoint(tmp_path / "exact")
    theirs, ours = snapshot(exact, names), snapshot(narrow, names)
    for key in (key for key in theirs if key.endswith("/master")):
        assert torch.equal(ours[key], theirs[key].bfloat16().float()), key


def test_records_have_no_remainder_and_gradients_are_added_up_in_bf16(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(NVME, nvme_path, accumulation=2))
    plan = engine.plan
    for space in layout_of(engine).spaces:
        record = plan.state_format(space)
        assert record.remainder is None and record.nbytes(1 << 20) == 4 << 20
    assert plan.accumulation == torch.bfloat16
    assert engine.bf16_master_weights_and_gradients() is True


def on_two_ranks(pair: tuple[str, str], folder: str, stage: int) -> Any:
    import zero

    quiet()
    with zero.initialize(model=build("gpt"), config=config_of(pair, folder, zero={"stage": stage}))[0] as engine:
        return snapshot(trained(engine), trainability(build("gpt")))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_hold_the_same_weights_wherever_they_live(rank_pool: Pool, nvme_path: Path, stage: int) -> None:
    held = []
    for states in ("none", "nvme"):
        pair = (states, states) if stage == 3 else ("none", states)
        held += rank_pool(2).run(on_two_ranks, pair, str(nvme_path), stage)
    for other in held[1:]:
        assert differences(other, held[0]) == []


def test_it_holds_while_bf16_does_and_is_for_adam(open_engine: Open, nvme_path: Path) -> None:
    off = load_config({"bf16": {**NARROW, "enabled": False}})
    assert not off.bf16_masters and off.accumulation_dtype == torch.float32
    wide = load_config({"bf16": NARROW, "data_types": {"grad_accum_dtype": "fp32"}})
    assert wide.bf16_masters and wide.accumulation_dtype == torch.float32
    for kind in ("Muon", "SGD", "RAdam"):
        block = {"type": kind, "params": {"lr": 1e-3}}
        with pytest.raises(
            ConfigError, match=r"bf16_master_weights_and_grads: true is only available with Adam.*set it to false"
        ):
            open_engine(build("gpt"), {**config_of(NVME, nvme_path, "fp32", optimizer=block)})
