"""Operations, parameters and time of each module in one forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BATCH, TOKENS, VOCAB, WIDTH, build, make_config, tokens
from probe import coordinator_of
from torch import nn

from offload.errors import ConfigError
from zero.flops_profiler import FlopsProfiler, format_short, get_model_profile

Open = Callable[..., Any]
ROWS = BATCH * TOKENS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Sequential(nn.ReLU(), nn.Linear(16, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def profile_of(model: nn.Module, run: Callable[[], Any]) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    run()
    profiler.stop_profile()
    return profiler


def test_the_sums_are_those_of_the_matrix_products() -> None:
    flops, macs, params = get_model_profile(Net(), (5, 8), print_profile=False, as_string=False)
    assert macs == 5 * (8 * 16 + 16 * 4) and flops == 2 * macs
    assert params == 8 * 16 + 16 + 16 * 4


def test_each_module_has_its_own_and_those_inside_it() -> None:
    model = Net()
    profile = profile_of(model, lambda: model(torch.ones(5, 8)))
    flops = {module.name: module.flops for module in profile.modules}
    assert flops == {"": 1920, "a": 1280, "b": 640, "b.0": 0, "b.1": 640}
    assert {module.name: module.depth for module in profile.modules}["b.1"] == 2
    assert all(module.seconds > 0 for module in profile.modules)
    assert profile.total.seconds >= sum(module.seconds for module in profile.modules if module.depth == 1)
    model(torch.ones(5, 8))
    assert not model._forward_hooks and not model.a._forward_pre_hooks


def test_products_with_vectors_are_counted() -> None:
    class Products(nn.Module):
        def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            return (matrix @ vector) @ (matrix @ vector)

    flops, _, _ = get_model_profile(
        Products(), args=[torch.ones(3, 5), torch.ones(5)], print_profile=False, as_string=False
    )
    assert flops == 2 * (2 * 3 * 5) + 2 * 3


def test_a_profile_begun_and_ended_by_hand_has_the_numbers_of_its_forwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    assert (profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()) == (0, 0, 0)
    for forwards in (1, 2):
        profiler.start_profile()
        for _ in range(forwards):
            model(torch.ones(5, 8))
        profiler.stop_profile()
        model(torch.ones(5, 8))
        assert profiler.get_total_flops() == 1920 * forwards and profiler.get_total_macs() == 960 * forwards
        assert profiler.get_total_params() == 8 * 16 + 16 + 16 * 4
        assert 0 < float(profiler.get_total_duration()) < 60
    assert profiler.get_total_flops(as_string=True) == "3.84 kFLOPs"
    profiler.print_model_profile(profile_step=4)
    assert "step 4" in (said := capsys.readouterr().out) and "b.1: Linear" in said
    profiler.print_model_profile(output_file=str(tmp_path / "profile"), detailed=False)
    assert "b.1" not in (written := (tmp_path / "profile").read_text()) and "3.84 kFLOP" in written
    profiler.end_profile()
    assert profiler.get_total_flops() == 0 and not model._forward_hooks and not model.a._forward_pre_hooks


def test_attention_on_the_cpu_counts_both_products() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    flops, _, _ = get_model_profile(Attention(), args=[torch.ones(2, 3, 16, 8)], print_profile=False, as_string=False)
    assert flops == 2 * 2 * 3 * (16 * 16 * 8) * 2


def test_the_table_goes_into_the_file_as_deep_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.txt"
    assert get_model_profile(Net(), (5, 8), output_file=str(path), module_depth=1) == ("1.92 k", "960 ", "208 ")
    text = path.read_text()
    assert "a: Linear" in text and "b: Sequential" in text and "b.1" not in text
    assert "depth 1, modules with the most operations: Linear 1.28 kFLOP" in text
    get_model_profile(Net(), (5, 8), output_file=str(path), detailed=False)
    assert "a: Linear" not in path.read_text()


def test_a_forward_runs_so_often_before_it_is_measured() -> None:
    calls = []
    model = Net()
    model.register_forward_hook(lambda *_: calls.append(1))
    get_model_profile(model, (1, 8), print_profile=False, warm_up=3)
    assert len(calls) == 4


@pytest.mark.parametrize("wrong", [{"mode": "train"}, {"ignore_modules": [nn.ReLU]}])
def test_what_is_not_there_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        get_model_profile(Net(), (1, 8), **wrong)


def test_a_forward_that_fails_leaves_no_hooks() -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        get_model_profile(model, (1, 9), print_profile=False, warm_up=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Late(nn.Module):
    """Its parts are called by a method of its own, as by `generate`, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.first = Net(), nn.Linear(8, 8)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.first(x))  # type: ignore[no-any-return]


def test_modules_have_their_own_numbers_whoever_calls_them() -> None:
    model, outer = Net(), nn.Sequential()
    outer.append(model)
    profile, late = profile_of(model, lambda: outer(torch.ones(5, 8))), Late()
    assert {module.name: module.flops for module in profile.modules}["b.1"] == 640
    profile = profile_of(late, lambda: late.generate(torch.ones(5, 8)))
    found = {module.name: module.flops for module in profile.modules}
    assert (found["first"], found["net"], found["net.b.1"]) == (640, 1920, 640)
    assert profile.total.flops == 640 + 1920 and profile.total.seconds > 0


def test_an_engines_module_has_its_numbers_in_a_profile_by_hand(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    profiler = profile_of(engine.module, lambda: engine(tokens(0)))
    found = {module.name: module.flops for module in profiler.modules}
    assert found["head"] == 2 * ROWS * WIDTH * VOCAB and found["blocks.0.up"] == 2 * ROWS * WIDTH * 4 * WIDTH


def test_a_modules_time_has_its_wait_for_weights(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    engine(tokens(0))
    coordinator, seconds = coordinator_of(engine), 0.05
    begin = coordinator.begin_forward_use

    def slow(*given: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return begin(*given, **more)

    monkeypatch.setattr(coordinator, "begin_forward_use", slow)
    profile = profile_of(engine.module, lambda: engine(tokens(0)))
    assert all(module.seconds >= seconds for module in profile.modules if module.name in ("", "head", "blocks.1"))


def test_the_profile_of_a_model_is_printed_and_leaves_it_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    get_model_profile(model, (5, 8), output_file="")
    assert "flops profiler" in (said := capsys.readouterr().out) and "0: Linear" in said
    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_products_that_are_one_operation_are_counted() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.ones(2, 6, 16)
    flops, _, _ = get_model_profile(attention, args=[x, x, x], print_profile=False, as_string=False)
    assert flops >= 2 * 2 * 6 * 16 * (3 * 16 + 16), "the projections at least"

    class Added(nn.Module):
        def forward(self, matrix: torch.Tensor, vector: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return torch.addmv(vector[:3], matrix, vector).sum() + torch.addbmm(batch[0], batch, batch).sum()

    given = [torch.ones(3, 5), torch.ones(5), torch.ones(2, 4, 4)]
    flops, _, _ = get_model_profile(Added(), args=given, print_profile=False, as_string=False)
    assert flops == 2 * 3 * 5 + 2 * 2 * 4 * 4 * 4


def test_a_backward_is_not_counted_and_a_reset_begins_again() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        profiler.reset_profile()
        model(torch.ones(5, 8)).sum().backward()
    profiler.stop_profile()
    assert profiler.flops == 1920


def test_a_rank_that_measures_nothing_says_zero() -> None:
    profiler = FlopsProfiler(Net())
    profiler.stop_profile()
    assert (profiler.flops, profiler.macs, profiler.params, profiler.get_total_duration()) == (0, 0, 0, 0.0)


@pytest.mark.parametrize("pair", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_an_engine_profiles_the_step_it_is_told_to_once(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture, pair: tuple[str, str]
) -> None:
    caplog.set_level(logging.INFO, logger="zero")
    block = {"enabled": True, "profile_step": 2, "module_depth": 2, "top_modules": 3, "detailed": True}
    model = build("gpt")
    engine = open_engine(model, make_config(pair, nvme_path, flops_profiler=block))
    assert engine.flops_profiler.flops == 0
    for index in range(4):
        assert len([text for text in caplog.messages if text.startswith("flops profiler")]) == (index >= 2)
        with torch.no_grad():
            engine(tokens(index))
        engine.backward(engine(tokens(index)))
        engine.step()
    (text,) = [text for text in caplog.messages if text.startswith("flops profiler, step 2")]
    flops = {module.name: module.flops for module in engine.flops_profiler.modules}
    assert flops["head"] == 2 * ROWS * WIDTH * VOCAB and flops["blocks.0.up"] == 2 * ROWS * WIDTH * 4 * WIDTH
    assert flops[""] == flops["head"] + sum(flops[f"blocks.{index}"] for index in range(3))
    assert engine.flops_profiler.get_total_flops() == flops[""]
    assert "blocks.0: Block" in text and "blocks.0.up" not in text
    assert engine.flops_profiler.params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 "), (999, "999 "), (1000, "1.00 k"), (1.5e6, "1.50 M"), (2e12, "2.00 T")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_short(value) == text
