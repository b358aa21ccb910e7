"""Ranks whose programs differ a little, as users' do: they train as under DistributedDataParallel, or all are told why
they cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters
from models import make_config, seeded, trainability
from probe import storage_of
from ranks import RankError, RankPool
from ranks_model import Moody, motley
from ranks_plain import Ddp, Opposite, Outcome, beyond
from ranks_runs import COUNT, Place, Run, by_either, engine_config, micro_batches, outcome_of, quiet
from reference import differences
from torch import Tensor, nn

import zero
from offload.errors import ConfigError

Pool = Callable[[int], RankPool]
LIMIT_SECONDS, STEPS = 60.0, 4


def told(pool: RankPool, job: Callable[..., Any], *args: Any) -> Any:
    """What each rank returns; a pool whose ranks have parted starts anew."""
    try:
        return pool.run(job, *args, timeout_seconds=LIMIT_SECONDS)
    except RankError:
        pool.restart()
        raise


# ---- a parameter that one rank leaves out -----------------------------------------------------


class Tall(nn.Module):
    """Large layers around one whose small parameter is always bound, and which one rank alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(101, 37)
        self.lower = nn.ModuleList(nn.Linear(37, 37, bias=False) for _ in range(4))
        self.moody = Moody(37, 211)
        self.upper = nn.ModuleList(nn.Linear(37, 37, bias=False) for _ in range(2))

    def forward(self, ids: Tensor, moody: bool) -> Tensor:
        x = self.first(ids)
        for layer in self.lower:
            x = torch.tanh(layer(x))
        x = self.moody(x, moody)
        for layer in self.upper:
            x = torch.tanh(layer(x))
        return x.square().mean()


def tall(place: Place | None, kind: type | None, nvme_path: str) -> Outcome:
    def inputs(step: int) -> tuple[Any, ...]:
        ids = torch.randint(0, 101, (5, 3), generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))
        return ids, dist.get_rank() == 0

    with seeded(0):
        model = Tall()
    return by_either(model, place, kind, nvme_path, inputs)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_small_parameter_that_one_rank_leaves_out_is_no_divergence(
    rank_pool: Pool, nvme_path: Any, tier: str
) -> None:
    keys = (("stage3_param_persistence_threshold", 500), ("stage3_max_live_parameters", 9_000))
    place = Place(3, tier, tier, shared=False, more=keys)
    ours = told(rank_pool(2), tall, place, None, str(nvme_path))[0]
    one, other = (rank_pool(2).run(tall, None, kind, str(nvme_path))[0] for kind in (Ddp, Opposite))
    assert beyond(ours, one, other) == []


# ---- backwards that are not reduced -----------------------------------------------------------


def without_sync(place: Place, nvme_path: str) -> Outcome:
    """Rank 0 has two backwards more than rank 1 in each step, and keeps their gradients for itself until its last."""
    import zero

    quiet()
    with seeded(0):
        model = nn.Sequential(nn.Linear(29, 37), nn.Tanh(), nn.Linear(37, 3))
    names = trainability(model)
    norms = []
    with zero.initialize(model=model, config=engine_config(Run(bf16=True), place, nvme_path))[0] as engine:
        for step in range(STEPS):
            count = 3 if dist.get_rank() == 0 else 1
            inputs = [torch.full((2, 29), 0.1 * (index + step), dtype=torch.bfloat16) for index in range(count)]
            with engine.no_sync():
                for x in inputs[:-1]:
                    engine.backward(engine(x).square().mean())
            engine.backward(engine(inputs[-1]).square().mean())
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return outcome_of(engine, names, norms)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_may_have_different_numbers_of_backwards_without_sync(
    rank_pool: Pool, nvme_path: Any, stage: int, shared: bool
) -> None:
    first, second = told(rank_pool(2), without_sync, Place(stage, shared=shared), str(nvme_path))
    assert differences(first.tensors, second.tensors) == []
    assert first.norms == second.norms and all(norm > 0 for norm in first.norms)


# ---- buffers ----------------------------------------------------------------------------------


class Masked(nn.Module):
    """Registers its mask anew for longer inputs, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.ones(2, 2).tril())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        if self.mask.shape[0] < length:
            self.register_buffer("mask", torch.ones(length, length).tril())
        if dist.get_rank() == 0:
            self.scale.mul_(1.5)
        return (self.mask[:length, :length] @ self.layer(x) * self.scale).square().mean()


def masked(place: Place, nvme_path: str) -> tuple[list[int], float]:
    import zero

    quiet()
    with seeded(0):
        model = Masked()
    with zero.initialize(model=model, config=engine_config(Run(), place, nvme_path))[0] as engine:
        for step in range(3):
            engine.backward(engine(torch.ones(4 + step + 3 * dist.get_rank(), 8)))
            engine.step()
        return list(engine.module.mask.shape), engine.module.scale.item()


@pytest.mark.parametrize("place", [Place(1), Place(3, "cpu", "cpu", shared=False)], ids=lambda place: place.name)
def test_a_buffer_whose_shape_follows_a_ranks_own_batch_is_its_own(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    first, second = told(rank_pool(2), masked, place, str(nvme_path))
    assert first == ([6, 6], 1.5**3)
    assert second == ([9, 9], 1.5**2), "other buffers are the first rank's, as of its last forward"


# ---- what one rank does besides -----------------------------------------------------------------


def profiled(place: Place, nvme_path: str, profiles: bool) -> dict[str, Tensor]:
    import zero

    quiet()
    config = engine_config(Run(bf16=True, accumulation=COUNT), place, nvme_path)
    config |= {"vertical_accumulation": True, "flops_profiler": {"enabled": profiles, "profile_step": 2}}
    with zero.initialize(model=motley(), config=config)[0] as engine:
        for step in range(STEPS):
            engine.train_batch(iter(micro_batches(step, agreed=True)))
        return masters(engine)


def test_a_step_that_one_rank_profiles_runs_one_after_the_other_on_all(rank_pool: Pool, nvme_path: Any) -> None:
    place = Place(3, "cpu", "cpu")
    found, expected = (told(rank_pool(2), profiled, place, str(nvme_path), profiles) for profiles in (True, False))
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():  # one step is summed in another way
        torch.testing.assert_close(found[0][name], value, rtol=0.02, atol=1e-3)


def unused(place: Place, nvme_path: str) -> int:
    """Device memory behind gradients that wait, which no plan has."""
    import zero

    quiet()
    config = engine_config(Run(bf16=True, accumulation=COUNT), place, nvme_path) | {"vertical_accumulation": True}
    with zero.initialize(model=motley(), config=config)[0] as engine:
        for step in range(STEPS):
            engine.train_batch(iter(micro_batches(step, agreed=False)))
        return storage_of(engine).unreduced_gradients.allocated_bytes


def test_zeros_of_what_a_rank_has_not_used_take_no_memory_of_their_own(rank_pool: Pool, nvme_path: Any) -> None:
    assert told(rank_pool(2), unused, Place(3, "cpu", "cpu"), str(nvme_path)) == [0, 0]


# ---- numbers ------------------------------------------------------------------------------------


def near_the_limit(shared: bool, nvme_path: str) -> tuple[int, float]:
    """Each rank's gradient fits fp16, and their sum does not."""
    import zero

    quiet()
    layer = nn.Linear(4, 1, bias=False)
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, fp16={"enabled": True, "loss_scale": 1})
    config["zero_optimization"] = {"stage": 0, "shared_host_memory": shared}
    with zero.initialize(model=layer, config=config)[0] as engine:
        loss = engine(torch.ones(1, 4, dtype=torch.float16)).float().sum() * 40_000
        engine.backward(loss)
        engine.step()
        return engine.skipped_steps, engine.get_global_grad_norm()


@pytest.mark.parametrize("shared", [True, False])
def test_the_mean_of_ranks_is_finite_where_their_sum_is_not(rank_pool: Pool, nvme_path: Any, shared: bool) -> None:
    for skipped, norm in told(rank_pool(2), near_the_limit, shared, str(nvme_path)):
        assert (skipped, norm) == (0, pytest.approx(80_000, rel=1e-3))


# ---- options ------------------------------------------------------------------------------------


def with_options_of_its_own(option: str, place: Place, nvme_path: str) -> tuple[str, dict[str, Tensor]]:
    """Rank 1 has another value in the second step, and the first rank's where the step is tried again."""
    quiet()
    config = engine_config(Run(bf16=True, clipping=1.0), place, nvme_path)
    if option == "gradient_clipping" and dist.get_rank() == 1:
        config[option] = 0.5
    said = ""
    with zero.initialize(model=motley(), config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(micro_batches(step, agreed=True)[0]))
            group = engine.optimizer.param_groups[0]
            usual = group.get(option)
            if step == 1 and dist.get_rank() == 1 and option in group:
                group[option] = [0.5, 0.6] if option == "betas" else 0.25
            try:
                engine.step()
            except ConfigError as error:
                said = str(error)
                if option not in group:
                    return said, {}
                group[option] = usual
                engine.step()
        return said, masters(engine)


@pytest.mark.parametrize("place", [Place(1), Place(3, "cpu", "nvme", shared=False)], ids=lambda place: place.name)
@pytest.mark.parametrize("option", ["lr", "betas", "gradient_clipping"])
def test_options_that_differ_between_ranks_are_told_on_all_and_the_step_can_be_tried_again(
    rank_pool: Pool, nvme_path: Any, option: str, place: Place
) -> None:
    found = told(rank_pool(2), with_options_of_its_own, option, place, str(nvme_path))
    plain = told(rank_pool(2), with_options_of_its_own, "none", place, str(nvme_path))
    for (said, values), (nothing, expected) in zip(found, plain, strict=True):
        assert f"{option} " in said and "on rank 0" in said and "on rank 1" in said and nothing == ""
        assert option == "gradient_clipping" or differences(values, expected) == []


# ---- a rank that fails --------------------------------------------------------------------------


def without_room(place: Place, nvme_path: str) -> str:
    """What each rank is told when one of them has no memory for a sum in fp32."""
    import zero
    from offload.errors import BudgetError

    quiet()
    with zero.initialize(model=motley(), config=engine_config(Run(bf16=True), place, nvme_path))[0] as engine:
        if dist.get_rank() == 1:

            def refuse(unit: Any) -> Any:
                raise BudgetError(f"no room for {unit.name}")

            storage_of(engine).add_fp32_gradient = refuse
        try:
            for index in range(2):
                engine.backward(engine(micro_batches(0, agreed=True)[index]))
            engine.step()
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize("place", [Place(3, "cpu", "cpu", shared=False), Place(2)], ids=lambda place: place.name)
def test_where_one_rank_has_no_room_all_are_told_so(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    pool = rank_pool(2)
    try:
        answers = pool.run(without_room, place, str(nvme_path), timeout_seconds=LIMIT_SECONDS)
    finally:
        pool.restart()
    assert all("no room for" in answer for answer in answers), answers


# ---- a table in tiles, of which ranks look up different rows --------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(300, 64), nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


def looked_up(nvme_path: str, frozen: bool) -> list[float]:
    with seeded(0):
        model = Table()
    model.table.weight.requires_grad_(not frozen)
    keys = {"shared_host_memory": False, "stage3_max_live_parameters": 8192}
    engine = zero.initialize(model=model, config=make_config(("cpu", "cpu"), nvme_path, bf16=False, zero=keys))[0]
    mine = torch.arange(40) + 200 * dist.get_rank()
    losses = []
    for _ in range(2):
        engine.eval()
        with torch.no_grad():
            losses.append(float(engine(mine)))
        engine.train()
        engine.backward(engine(mine))
        engine.step()
    engine.close()
    return losses


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_use_the_same_tiles_whatever_ids_they_have(rank_pool: Pool, nvme_path: Any, frozen: bool) -> None:
    assert all(len(losses) == 2 for losses in told(rank_pool(2), looked_up, str(nvme_path), frozen))
