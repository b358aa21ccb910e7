"""`zero.OffloadOptimizer` is the torch optimizer of its class, with the states elsewhere."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_runs import DEVICES, backward, both, groups_of, offloaded, same, state_differences, train
from probe import storages_behind
from recovery import descriptors, in_a_fork, movers
from reference import round_half_away
from tiled_optimizers import Patchy, patchy
from torch import nn

import zero
from offload.errors import BudgetError, ConfigError, StateError
from zero.ops.adam import DeepSpeedCPUAdam
from zero.ops.lamb import Lamb

STEPS = range(20)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
}


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 5))


# ---- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_20_steps_have_the_bits_of_the_torch_optimizer(nvme_path: Path, kind: str, device: str) -> None:
    # Groups with options of their own, a schedule, clipping, a branch that has no gradient now and one that never has.
    make, options = KINDS[kind]
    with both(device, nvme_path, make, **options) as (expected, plain, model, ours):
        train(expected, plain, STEPS, warmup(plain))
        train(model, ours, STEPS, warmup(ours))
        assert same(expected, model) == []
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        assert model.idle.weight not in ours.state


def matrices_of(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": wide[:2]}, {"params": wide[2:], "lr": 0.01}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Muon, Lamb])
def test_classes_that_look_at_whole_parameters_have_them_whole(
    nvme_path: Path, kind: Any, dtype: torch.dtype, device: str
) -> None:
    expected, model = patchy().to(dtype), patchy().to(dtype)
    groups = matrices_of if kind is torch.optim.Muon else groups_of
    masters = {p: nn.Parameter(p.detach().float()) for p in expected.parameters()}
    plain = kind([{**g, "params": [masters[p] for p in g["params"]]} for g in groups(expected)], lr=0.02)
    with zero.OffloadOptimizer(groups(model), kind, offload=offloaded(device, nvme_path), lr=0.02) as ours:
        for index in range(8):
            backward(expected, index)
            for parameter, master in masters.items():
                master.grad = None if parameter.grad is None else parameter.grad.float()
            plain.step()
            with torch.no_grad():
                for parameter, master in masters.items():
                    parameter.copy_(round_half_away(master) if dtype == torch.bfloat16 else master)
            expected.zero_grad()
            backward(model, index)
            ours.step()
            model.zero_grad()
        assert same(expected, model) == []
        state = {"state": {k: v for k, v in ours.state_dict()["state"].items()}}
        found = state_differences(
            {**plain.state_dict(), "param_groups": 0}, {**state, "param_groups": 0}, but=("master", "step")
        )
        assert [line for line in found if not line.startswith("names of")] == []


def test_states_are_on_the_tier_that_was_asked_for(nvme_path: Path) -> None:
    for device in DEVICES:
        with both(device, nvme_path) as (_, _, model, ours):
            train(model, ours, range(2))
            (storage,) = storages_behind(ours)
            written = storage.disk.traffic.write_bytes if storage.disk else 0
            records = sum(plane.numel * 8 for plane in storage.state_arrays)
            assert (written >= records) == (device == "nvme")
            rows = {(row.tier, row.array) for row in ours.plans[0].rows}
            assert ({"cpu": "host", "nvme": "nvme"}[device], "optimizer states") in rows
        assert os.listdir(nvme_path) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_grad_scaler_skips_and_unscales_as_with_torch(nvme_path: Path, device: str) -> None:
    with both(device, nvme_path, lr=1e-2) as (expected, plain, model, ours):
        scales = []
        for net, optimizer in ((expected, plain), (model, ours)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
            for index in range(12):
                backward(net, index, scaler.scale)
                if index == 5:
                    net.outside.weight.grad[0, 0] = float("inf")
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=False)
            scales.append(scaler.get_scale())
        assert same(expected, model) == []
        assert scales[0] == scales[1]
        assert float(ours.state[model.outside.weight]["step"]) == 11


def test_a_closure_hooks_and_the_default_class_are_torchs(nvme_path: Path) -> None:
    model, expected, seen = patchy(), patchy(), []
    plain = torch.optim.AdamW(expected.parameters())
    with zero.OffloadOptimizer(model.parameters(), offload=offloaded("nvme", nvme_path)) as ours:
        ours.register_step_pre_hook(lambda *_: seen.append("before"))
        ours.register_step_post_hook(lambda *_: seen.append("after"))
        for net, optimizer in ((model, ours), (expected, plain)):

            def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> float:
                optimizer.zero_grad()
                backward(net, 0)
                return 7.0

            assert optimizer.step(closure) == 7.0
        assert same(expected, model) == [] and seen == ["before", "after"]
        assert ours.param_groups[0]["lr"] == 1e-3 and ours.defaults == plain.defaults


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_that_is_added_later_trains_along(nvme_path: Path, device: str) -> None:
    expected, model = patchy(), patchy()
    first = [[p for n, p in m.named_parameters() if not n.startswith("outside")] for m in (expected, model)]
    plain = torch.optim.AdamW(first[0], lr=1e-2)
    with zero.OffloadOptimizer(first[1], lr=1e-2, offload=offloaded(device, nvme_path)) as ours:
        for net, optimizer in ((expected, plain), (model, ours)):
            train(net, optimizer, range(3))
            optimizer.add_param_group({"params": list(net.outside.parameters()), "lr": 5e-3})
            train(net, optimizer, range(3, 8))
        assert same(expected, model) == []
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        with pytest.raises(ValueError, match="more than one parameter group"):
            ours.add_param_group({"params": list(model.outside.parameters())})


def test_named_parameters_and_other_memory_formats_train_as_with_torch(nvme_path: Path) -> None:
    def convolution() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
        return net.to(memory_format=torch.channels_last)

    expected, model = convolution(), convolution()
    plain = torch.optim.AdamW(expected.named_parameters(), lr=1e-2)
    with zero.OffloadOptimizer(model.named_parameters(), lr=1e-2, offload=offloaded("nvme", nvme_path)) as ours:
        for net, optimizer in ((expected, plain), (model, ours)):
            for index in range(4):
                torch.manual_seed(index)
                net(torch.randn(2, 3, 8, 8)).square().mean().backward()
                net[2].weight.grad = net[2].weight.grad.t().contiguous().t()  # another order than the weight's
                optimizer.step()
                optimizer.zero_grad()
        assert same(expected, model) == []
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        assert "0.weight" in ours.param_groups[0]["param_names"]


def test_frozen_parameters_take_no_room_until_they_are_trained(nvme_path: Path) -> None:
    expected, model = patchy(), patchy()
    for net in (expected, model):
        net.branches.requires_grad_(False)
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with zero.OffloadOptimizer(model.parameters(), lr=1e-2, offload=offloaded("nvme", nvme_path)) as ours:
        (plan,) = ours.plans
        frozen = sum(p.numel() for p in model.branches.parameters())
        assert plan.tier_bytes("nvme") < 8 * (sum(p.numel() for p in model.parameters()) - frozen + 4096)
        for net, optimizer in ((expected, plain), (model, ours)):
            train(net, optimizer, range(2))
            net.branches.requires_grad_(True)
            train(net, optimizer, range(2, 5))
        assert same(expected, model) == [] and len(ours.plans) == 2
        for parameter in (resumed := patchy()).parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        with zero.OffloadOptimizer(resumed.parameters(), lr=1e-2, offload=offloaded("nvme", nvme_path)) as other:
            other.load_state_dict(ours.state_dict())
            assert state_differences(plain.state_dict(), other.state_dict()) == []


def test_the_number_of_threads_changes_no_bit(nvme_path: Path) -> None:
    weights = [nn.Parameter(torch.randn(700, 301, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    plain = torch.optim.AdamW(weights[:1], lr=1e-2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        offload = offloaded("nvme", nvme_path, sub_group_size=1 << 20)
        with zero.OffloadOptimizer(weights[1:], lr=1e-2, offload=offload) as ours:
            for step in range(4):
                for weight in weights:
                    weight.grad = torch.randn(700, 301, generator=torch.Generator().manual_seed(step + 1))
                for optimizer in (plain, ours):
                    optimizer.step()
            assert torch.equal(*weights)
    finally:
        torch.set_num_threads(before)


def test_our_kernel_updates_where_its_class_is_asked_for(nvme_path: Path) -> None:
    with both("nvme", nvme_path, DeepSpeedCPUAdam, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(5))
        train(model, ours, range(5))
        assert same(expected, model) == []


def test_bf16_states_of_our_kernel_train_on_and_resume(nvme_path: Path) -> None:
    def opened(net: Patchy) -> Any:
        offload = offloaded("nvme", nvme_path, state_dtype="bf16")
        return zero.OffloadOptimizer(groups_of(net), DeepSpeedCPUAdam, lr=1e-2, offload=offload)

    model, resumed = patchy(), patchy()
    with opened(model) as ours, opened(resumed) as other:
        train(model, ours, range(3))
        resumed.load_state_dict(model.state_dict())
        other.load_state_dict(ours.state_dict())
        train(model, ours, range(3, 6))
        train(resumed, other, range(3, 6))
        assert same(model, resumed) == []


# ---- 16-bit parameters ----------------------------------------------------------------------------------------------


class Masters:
    """torch's AdamW over fp32 copies of 16-bit parameters, which are the copies rounded."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, **options)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(rounded(master, parameter.dtype))
                parameter.grad = None

    def zero_grad(self) -> None:
        pass


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest; of bf16 half away from zero, which is what the exact split rests on."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    return ((master.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_parameters_have_an_fp32_master_beside_the_states(
    nvme_path: Path, dtype: torch.dtype, device: str
) -> None:
    expected, model = patchy().to(dtype), patchy().to(dtype)
    plain = Masters(expected, lr=1e-3, weight_decay=0.1)
    offload = offloaded(device, nvme_path)
    with zero.OffloadOptimizer(model.parameters(), lr=1e-3, weight_decay=0.1, offload=offload) as ours:
        for net, optimizer in ((expected, plain), (model, ours)):
            train(net, optimizer, range(12))  # type: ignore[arg-type]
        assert same(expected, model) == []
        state = ours.state_dict()["state"]
        for index, master in enumerate(plain.masters):
            if index in state:
                assert torch.equal(state[index]["master"], master)
                assert torch.equal(state[index]["exp_avg"], plain.inner.state[master]["exp_avg"])


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_16_bit_runs_resume_bit_for_bit_in_either_order(
    nvme_path: Path, kind: type[torch.optim.Optimizer], dtype: torch.dtype, weights_first: bool
) -> None:
    """Of SGD without momentum the master is all that there is."""

    def opened(net: nn.Module) -> Any:
        return zero.OffloadOptimizer(net.parameters(), kind, lr=1e-3, offload=offloaded("nvme", nvme_path))

    model, resumed = patchy().to(dtype), patchy(seed=9).to(dtype)
    with opened(model) as ours, opened(resumed) as other:
        train(model, ours, range(5))
        train(resumed, other, range(2))  # so that masters and states of its own are there to be replaced
        loads: list[Callable[[], Any]] = [
            lambda: resumed.load_state_dict(model.state_dict()),
            lambda: other.load_state_dict(ours.state_dict()),
        ]
        for load in loads if weights_first else reversed(loads):
            load()
        train(model, ours, range(5, 10))
        train(resumed, other, range(5, 10))
        assert same(model, resumed) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_an_edit_of_a_16_bit_weight_counts(nvme_path: Path, dtype: torch.dtype) -> None:
    model = patchy().to(dtype)
    with zero.OffloadOptimizer(model.parameters(), lr=1e-4, offload=offloaded("cpu", nvme_path)) as ours:
        train(model, ours, range(3))
        with torch.no_grad():
            model.outside.weight.fill_(0.5)
        train(model, ours, range(3, 4))
        # What a bf16 weight lacked of its master, half a unit in the last place at most, stays with it.
        ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert float((model.outside.weight.detach() - 0.5).abs().max()) <= ulp
        assert float((ours.state[model.outside.weight]["master"] - 0.5).abs().max()) <= ulp / 2 + 2e-4


# ---- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum", "Adagrad"])
def test_a_run_goes_on_with_torchs_optimizer_and_back(nvme_path: Path, tmp_path: Path, kind: str, device: str) -> None:
    make, options = KINDS[kind]
    with both(device, nvme_path, make, **options) as (expected, plain, model, ours):
        train(expected, plain, range(4))
        train(model, ours, range(4))
        torch.save(ours.state_dict(), tmp_path / "optimizer.pt")
        third = patchy()
        third.load_state_dict(model.state_dict())
        fresh = make(groups_of(third), **options)
        fresh.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        train(expected, plain, range(4, 9))
        train(third, fresh, range(4, 9))
        assert same(expected, third) == []
        fourth = patchy()
        fourth.load_state_dict(third.state_dict())
        with zero.OffloadOptimizer(groups_of(fourth), make, offload=offloaded(device, nvme_path), **options) as back:
            back.load_state_dict(fresh.state_dict())
            train(expected, plain, range(9, 14))
            train(fourth, back, range(9, 14))
            assert same(expected, fourth) == []
            assert state_differences(plain.state_dict(), back.state_dict()) == []


def test_states_that_are_loaded_replace_all_that_was_there(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(model, ours, range(3))
        ours.load_state_dict(plain.state_dict())  # of no step
        model.load_state_dict(expected.state_dict())
        assert len(ours.state) == 0
        train(expected, plain, range(4))
        train(model, ours, range(4))
        assert same(expected, model) == []


def test_states_of_another_shape_or_class_are_refused_and_change_nothing(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(3))
        train(model, ours, range(3))
        wrong = plain.state_dict()
        wrong["state"] = {key: dict(state) for key, state in wrong["state"].items()}
        wrong["state"][0]["exp_avg"] = torch.zeros(3, 3)
        wrong["param_groups"] = [{**group, "lr": 0.5} for group in wrong["param_groups"]]
        with pytest.raises(ConfigError, match=r"exp_avg of parameter 0.*expected \(150, 21\)"):
            ours.load_state_dict(wrong)
        momentum = torch.optim.SGD(groups_of(patchy()), lr=0.1, momentum=0.9)
        with pytest.raises(ConfigError):
            ours.load_state_dict({**momentum.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(150, 21)}}})
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        train(expected, plain, range(3, 5))
        train(model, ours, range(3, 5))
        assert same(expected, model) == []


def test_a_state_dict_that_has_no_room_is_refused(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both("nvme", nvme_path) as (_, _, model, ours):
        train(model, ours, range(1))
        from zero.optim import offload_optimizer

        machine = offload_optimizer.read_machine(torch.device("cpu"))
        short = type(machine)(1000, "MemAvailable", None, None, 0)
        monkeypatch.setattr(offload_optimizer, "read_machine", lambda device: short)
        with pytest.raises(BudgetError, match=r"optimizer.state\[parameter\] one by one"):
            ours.state_dict()
        assert float(ours.state[model.gain]["step"]) == 1


# ---- what cannot be -------------------------------------------------------------------------------------------------


class Doubled(torch.optim.Optimizer):
    """Looks at the norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def of_one(values: torch.Tensor) -> dict[str, Any]:
    return {"offload": {"device": "cpu"}, "params": [nn.Parameter(values)]}


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no device": (lambda path: {"offload": {"nvme_path": str(path)}}, "device"),
    "none": (lambda path: {"offload": {"device": "none"}}, "torch optimizer itself"),
    "no path": (lambda path: {"offload": {"device": "nvme"}}, "nvme_path"),
    "an unknown key": (
        lambda path: {"offload": {"device": "cpu", "ratio": 0.5}},
        "expected keys among device, .*, got ratio",
    ),
    "narrow states": (lambda path: {"offload": {"device": "cpu", "state_dtype": "bf16"}}, "DeepSpeedCPUAdam"),
    "8 bits": (lambda path: {"offload": {"device": "cpu", "state_dtype": "8bit"}}, "fp32 or bf16"),
    "rows of means": (
        lambda path: {"offload": {"device": "cpu"}, "optimizer_class": torch.optim.Adafactor},
        r"states that do not have the parameter's shape \(row_var, col_var, variance\)",
    ),
    "a norm over what is turned": (
        lambda path: {**of_one(torch.ones(4, 3).t()), "optimizer_class": Doubled},
        "updates whole parameters: .*contiguous",
    ),
    "float64": (lambda path: of_one(torch.ones(2).double()), "float64"),
    "meta": (lambda path: of_one(torch.ones(2, device="meta")), "to_empty"),
    "gaps": (lambda path: of_one(torch.ones(4, 4)[:, :2]), "gaps"),
    "twice": (lambda path: {**of_one(torch.ones(2)), "params": [nn.Parameter(torch.ones(2))] * 2}, "got one twice"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_offloaded_is_refused_with_the_alternative(nvme_path: Path, what: str) -> None:
    make, told = REFUSED[what]
    before = movers(), descriptors()
    with pytest.raises(ConfigError, match=told):
        zero.OffloadOptimizer(**{"params": patchy().parameters(), **make(nvme_path)})
    assert (movers(), descriptors()) == before


@pytest.mark.parametrize("device", DEVICES)
def test_states_or_records_that_have_no_room_are_refused_before_anything_is_made(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    from zero.optim import parameter_states

    machine = parameter_states.machine_to_plan(torch.device("cpu"))
    short = type(machine)(100_000, "MemAvailable", None, None, 0)
    monkeypatch.setattr(parameter_states, "machine_to_plan", lambda device: short)
    before = movers(), descriptors()
    fix = 'set device to "nvme"' if device == "cpu" else "a smaller sub_group_size"
    with pytest.raises(BudgetError, match=fix):
        zero.OffloadOptimizer(patchy().parameters(), offload=offloaded(device, nvme_path))
    assert (movers(), descriptors()) == before


def test_an_empty_list_is_refused_by_torch_itself() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        zero.OffloadOptimizer([], offload={"device": "cpu"})


def test_a_parameter_that_has_moved_or_a_gradient_of_another_dtype_is_refused_before_a_bit_changes(
    nvme_path: Path,
) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(2))
        train(model, ours, range(2))
        backward(model, 2)
        backward(expected, 2)
        kept = model.gain.data
        model.gain.data = model.gain.data.double()
        with pytest.raises(StateError, match="after the model has been moved to its device"):
            ours.step()
        model.gain.data = kept
        sparse = model.inside.weight.grad
        model.inside.weight.grad = sparse.to_sparse()
        with pytest.raises(StateError, match=r"gradient of .*dense"):
            ours.step()
        model.inside.weight.grad = sparse
        plain.step()
        ours.step()
        assert same(expected, model) == []


def test_other_memory_of_a_parameter_is_found_at_the_next_step(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        for net, optimizer in ((expected, plain), (model, ours)):
            train(net, optimizer, range(2))
            for parameter in net.parameters():
                parameter.data = parameter.data.clone()
            train(net, optimizer, range(2, 5))
        assert same(expected, model) == []


def test_autograd_notices_that_a_graph_has_lost_its_weights(nvme_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    with zero.OffloadOptimizer([weight], offload=offloaded("cpu", nvme_path)) as ours:
        loss = (weight * weight).sum()
        loss.backward(retain_graph=True)
        ours.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_copies_pickles_and_forked_children_are_refused(nvme_path: Path) -> None:
    with both("nvme", nvme_path) as (_, _, model, ours):
        train(model, ours, range(1))
        for action in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(StateError, match=r"save its state_dict\(\)"):
                action(ours)
        for use in (ours.step, ours.state_dict, lambda: ours.state[model.gain]):
            told = in_a_fork(use)
            assert told.startswith("StateError") and "was forked from the one that has the" in told
        train(model, ours, range(1, 2))


def test_a_closed_or_dropped_optimizer_gives_everything_back(nvme_path: Path) -> None:
    model = patchy()
    gc.collect()
    before = movers(), descriptors()
    for drops in (False, True):
        ours = zero.OffloadOptimizer(model.parameters(), offload=offloaded("nvme", nvme_path))
        train(model, ours, range(2))
        assert (movers(), descriptors()) != before
        assert os.listdir(nvme_path) == [], "a killed job would leave it"
        if not drops:
            ours.close()
            ours.close()
            for use in (ours.step, ours.state_dict, lambda ours=ours: ours.load_state_dict({})):
                with pytest.raises(StateError, match="closed"):
                    use()
        del ours
        gc.collect()
        assert (movers(), descriptors()) == before


# ---- what users do between steps ------------------------------------------------------------------------------------


def test_a_group_that_joins_decays_as_the_others(nvme_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "adamw_mode": False}
    models = [nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = DeepSpeedCPUAdam(models[0][0].parameters(), **options)
    with zero.OffloadOptimizer(
        models[1][0].parameters(), DeepSpeedCPUAdam, offload=offloaded("nvme", nvme_path), **options
    ) as ours:
        for model, optimizer in zip(models, (plain, ours), strict=True):
            optimizer.add_param_group({"params": list(model[1].parameters())})
            for index in range(3):
                model[1](model[0](torch.full((2, 8), 0.1 * index))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert same(*models) == []


def test_a_graph_of_weights_that_no_step_has_changed_may_still_be_walked(nvme_path: Path) -> None:
    models = [[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)] for _ in range(2)]
    for one, other in zip(*models, strict=True):
        other.load_state_dict(one.state_dict())
    plain = torch.optim.AdamW([p for model in models[0] for p in model.parameters()], lr=0.01)
    mine = [p for model in models[1] for p in model.parameters()]
    with zero.OffloadOptimizer(mine, torch.optim.AdamW, offload=offloaded("nvme", nvme_path), lr=0.01) as ours:
        for (first, second), optimizer in zip(models, (plain, ours), strict=True):
            losses = [model(torch.ones(2, 8)).square().mean() for model in (first, second)]
            for loss in losses:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [same(one, other) for one, other in zip(*models, strict=True)] == [[], []]


def test_weights_whose_order_in_memory_changes_are_refused(nvme_path: Path) -> None:
    net = nn.Conv2d(3, 8, 3)
    with zero.OffloadOptimizer(net.parameters(), torch.optim.AdamW, offload=offloaded("nvme", nvme_path)) as ours:
        net(torch.ones(1, 3, 5, 5)).sum().backward()
        ours.step()
        net.to(memory_format=torch.channels_last)
        net(torch.ones(1, 3, 5, 5)).sum().backward()
        with pytest.raises(StateError, match=r"is no longer that of their states.*before making the optimizer"):
            ours.step()
        net.to(memory_format=torch.contiguous_format)
        ours.step()


def test_states_are_not_replaced_by_an_empty_dict(nvme_path: Path) -> None:
    net = nn.Linear(8, 8)
    with zero.OffloadOptimizer(net.parameters(), torch.optim.AdamW, offload=offloaded("nvme", nvme_path)) as ours:
        net(torch.ones(1, 8)).sum().backward()
        ours.step()
        with pytest.raises(StateError, match=r"cannot be replaced by a dict.*load_state_dict, or make a new optimizer"):
            ours.state = {}
        assert len(ours.state_dict()["state"]) == 2
