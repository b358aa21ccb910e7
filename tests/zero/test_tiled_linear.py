"""TiledLinear: DeepSpeed's semantics, one tile live at a time, and the numbers of the whole Linear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import make_config, seeded, trainability
from reference import Hyper, Reference, differences, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from offload.errors import ConfigError, StateError

Open = Callable[..., Any]
IN, OUT = 96, 320


def whole(bias: bool = True) -> nn.Linear:
    with seeded(0):
        return nn.Linear(IN, OUT, bias=bias)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 5, IN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_splits", [1, 2, 5])
def test_split_outputs_give_the_bits_of_the_whole(out_splits: int, bias: bool) -> None:
    linear = whole(bias)
    tiled = zero.TiledLinear(IN, OUT, bias, out_splits=out_splits, init_linear=linear)
    assert torch.equal(tiled(batch()), linear(batch()))


@pytest.mark.parametrize(("in_splits", "out_splits"), [(2, 1), (7, 3), (IN, 1), (5, OUT)])
def test_split_inputs_differ_by_the_rounding_of_partial_sums_only(in_splits: int, out_splits: int) -> None:
    linear, x = whole(), batch()
    tiled = zero.TiledLinear(IN, OUT, in_splits=in_splits, out_splits=out_splits, init_linear=linear)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    bound = (x.abs().double() @ linear.weight.abs().double().T + linear.bias.abs()) * (IN + 1)
    assert torch.all((tiled(x) - exact).abs() <= bound * torch.finfo(torch.float32).eps)


def test_uneven_splits_differ_by_one_with_the_larger_first() -> None:
    tiled = zero.TiledLinear(10, 8, in_splits=4, out_splits=3)
    assert tiled.in_parts == [0, 3, 6, 8, 10] and tiled.out_parts == [0, 3, 6, 8]
    assert [[tuple(t.weight.shape) for t in row] for row in tiled.linears] == [
        [(o, i) for i in (3, 3, 2, 2)] for o in (3, 3, 2)
    ]
    assert [t.bias is not None for t in tiled.linears[0]] == [False, False, False, True]
    assert list(tiled.state_dict())[:2] == ["linears.0.0.weight", "linears.0.1.weight"]


def test_split_inputs_may_come_split_and_outputs_stay_so() -> None:
    linear, x = whole(), batch()
    tiled = zero.TiledLinear(
        IN, OUT, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=linear
    )
    joined = zero.TiledLinear(IN, OUT, in_splits=3, out_splits=2, init_linear=linear)
    parts = tiled(x.split(32, dim=-1))
    assert isinstance(parts, list) and [part.shape[-1] for part in parts] == [160, 160]
    assert torch.equal(torch.cat(parts, -1), joined(x))
    with pytest.raises(StateError, match="expected an input of 3 splits, got 2"):
        tiled(x.split(48, dim=-1))


class BiasAside(nn.Linear):
    """As Megatron-LM's: the bias is returned."""

    def __init__(self, *sizes: int, bias: bool = True, scale: float = 1.0) -> None:
        super().__init__(*sizes, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight) * self.scale, self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_a_returned_bias_is_joined_and_not_summed(bias: bool) -> None:
    linear = whole(bias)
    tiled = zero.TiledLinearReturnBias(
        IN, OUT, bias, in_splits=2, out_splits=4, linear_cls=BiasAside, init_linear=linear, scale=2.0
    )
    output, returned = tiled(batch())
    torch.testing.assert_close(output, 2 * nn.functional.linear(batch(), linear.weight))
    assert returned is None if not bias else torch.equal(returned, linear.bias)


@pytest.mark.parametrize(("in_splits", "out_splits"), [(0, 1), (IN + 1, 1), (1, -1), (1, OUT + 1)])
def test_impossible_splits_are_a_runtime_error_with_the_argument(in_splits: int, out_splits: int) -> None:
    with pytest.raises(RuntimeError, match=r"(in|out)_splits must be in \[1, (in|out)_features\], got"):
        zero.TiledLinear(IN, OUT, in_splits=in_splits, out_splits=out_splits)


def test_values_of_another_shape_or_bias_are_refused() -> None:
    tiled = zero.TiledLinear(IN, OUT, out_splits=2)
    with pytest.raises(ConfigError, match=r"expected a weight of shape \(320, 96\) and a bias, got \(320, 96\) and no"):
        tiled.copy_params_from(whole(bias=False))
    with pytest.raises(ConfigError, match=r"expected a weight of shape \(320, 96\)"):
        tiled.copy_params_from(nn.Linear(OUT, IN))


class Mlp(nn.Module):
    def __init__(self, reentrant: bool | None, **splits: int) -> None:
        super().__init__()
        self.first = nn.Linear(IN, IN)
        self.wide = zero.TiledLinear(IN, OUT, **splits)
        self.last, self.reentrant = nn.Linear(OUT, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        x = self.wide(x) if self.reentrant is None else checkpoint(self.wide, x, use_reentrant=self.reentrant)
        return self.last(x).float().square().mean()


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_tiles_are_units_that_come_one_after_the_other_and_train(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], reentrant: bool | None
) -> None:
    """8 x 2 tiles of 1,920 elements (4,096 padded) under a limit of six of them: 16 would not fit."""
    with seeded(2):
        model = Mlp(reentrant, in_splits=2, out_splits=8)
    plain, names, limit = copy.deepcopy(model), trainability(model), 6 * 4096
    engine = open_engine(model, make_config(pair, nvme_path, zero={"stage3_max_live_parameters": limit}))
    group = engine.optimizer.param_groups[0]
    hyper = Hyper(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"], group["decoupled"])
    reference = Reference(plain, lambda name: hyper)
    for step in range(3):
        for trainer in (engine, reference):
            trainer.backward(trainer(batch(step)))
            trainer.step()
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    tiles = [unit for unit in engine.units if "linears" in unit.name]
    assert len(tiles) == 16 and engine.statistics().live_numel_peak <= limit


def test_values_reach_tiles_that_an_engine_keeps(open_engine: Open, nvme_path: Any) -> None:
    model, linear = zero.TiledLinear(IN, OUT, out_splits=4, in_splits=2), whole()
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, bf16=False))
    model.copy_params_from(linear)
    rows = [torch.cat([engine.full_parameter(f"linears.{o}.{i}.weight") for i in range(2)], 1) for o in range(4)]
    assert torch.equal(torch.cat(rows), linear.weight)
    biases = [engine.full_parameter(f"linears.{o}.1.bias") for o in range(4)]
    assert torch.equal(torch.cat(biases), linear.bias)
    assert all(begin < end for begin, end in pairwise(model.out_parts))
