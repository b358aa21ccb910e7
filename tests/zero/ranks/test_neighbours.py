"""hpZ: weights that neighbours share out a second time change which ranks a gather needs, and no number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import freeze, seeded, trainability
from ranks import RankPool
from ranks_model import Moody
from ranks_plain import Outcome
from ranks_runs import CLIPPING, Place, Run, engine_config, outcome_of, quiet
from reference import differences
from torch import Tensor, nn

Pool = Callable[[int], RankPool]

WIDTH, HIDDEN = 37, 211
NEAR = "gather inside nodes"
STEPS, MICRO_STEPS = 2, 2


class Clamped(nn.Module):
    """Its forward changes its own weight, in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width * HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.75)
        return x * self.scale.view(HIDDEN, -1).sum(0)


class Chain(nn.Module):
    """Blocks in a row, one of them frozen, one that changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moody(WIDTH, HIDDEN) for _ in range(2))
        self.frozen = Moody(WIDTH, HIDDEN)
        self.clamped = Clamped(WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        freeze(self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.clamped(self.frozen(x))).square().mean()


def chain(seed: int = 0) -> Chain:
    with seeded(seed):
        return Chain()


def config_of(place: Place, nvme_path: str, size: int, **more: Any) -> dict[str, Any]:
    config = engine_config(Run(4, MICRO_STEPS, CLIPPING, **more), place, nvme_path)
    config["zero_optimization"]["zero_hpz_partition_size"] = size
    config["zero_optimization"]["stage3_max_live_parameters"] = 68_000  # not all of it
    return config


def data(engine: Any, index: int) -> Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(17 * index + dist.get_rank()))
    return x.to(engine.get_data_types()[0])


# What happens between the micro-batches of a step; engine and number of the step are given.


def evaluate(engine: Any, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        engine(data(engine, 1_000 + step))
    engine.train()


def edit(engine: Any, step: int) -> None:
    import zero

    weights = [engine.module.blocks[1].up.weight, engine.module.frozen.down.weight]
    with zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def load(engine: Any, step: int) -> None:
    """Other values from a file, for trained and frozen weights."""
    import zero

    zero.load_pretrained(engine, f"{engine.folder}/{step}.safetensors")


def all_of_it(engine: Any, step: int) -> None:
    evaluate(engine, step)
    edit(engine, step)
    evaluate(engine, step)
    load(engine, step)


BETWEEN: Mapping[str, Callable[[Any, int], None]] = {
    "nothing": lambda engine, step: None,
    "an evaluation": evaluate,
    "an edit": edit,
    "other weights from a file": load,
    "all of it": all_of_it,
}


def train(engine: Any, between: str) -> tuple[list[float], list[dict[str, int]]]:
    """Norms, and what collectives had handled before each step."""
    norms, payloads = [], []
    for step in range(STEPS):
        for micro in range(MICRO_STEPS):
            engine.backward(engine(data(engine, MICRO_STEPS * step + micro)))
            if micro == 0:
                engine.step()
                BETWEEN[between](engine, step)
        payloads.append(dict(engine.statistics().payload_numel))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, payloads


def trained(
    place: Place, nvme_path: str, size: int, between: str = "nothing", bf16: bool = False
) -> tuple[Outcome, list[dict[str, int]], dict[str, int]]:
    """The outcome, what collectives had handled before each step, and sizes of the plan."""
    import zero

    quiet()
    model = chain()
    names = trainability(model)
    config = config_of(place, nvme_path, size, bf16=bf16)
    with zero.initialize(model=model, config=config)[0] as engine:
        engine.folder = nvme_path
        norms, payloads = train(engine, between)
        sizes = {
            "near": sum(row.nbytes for row in engine.plan.rows if row.array == "weights shared out inside nodes"),
            "trained": sum(unit.numel for unit in engine.units if unit.trainable),
            "frozen": sum(unit.numel for unit in engine.units if not unit.trainable),
            "bytes": sum(unit.nbytes for unit in engine.units),
        }
        return outcome_of(engine, names, norms), payloads, sizes


def files(folder: Any) -> None:
    from safetensors.torch import save_file

    for step in range(STEPS):
        save_file(
            {name: p.detach() for name, p in chain(100 + step).named_parameters()}, f"{folder}/{step}.safetensors"
        )


PLACES = (
    Place(3, shared=False), Place(3, "cpu", "nvme", shared=False), Place(3, "nvme", "nvme", shared=False),
)  # fmt: skip
Told = list[tuple[Outcome, list[dict[str, int]], dict[str, int]]]


@pytest.fixture(scope="module")
def run(rank_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Told]:
    """`run(place, size, between, bf16)` -> what each of four ranks tells; every case runs once."""
    folder = tmp_path_factory.mktemp("nvme")
    files(folder)
    known: dict[tuple[Any, ...], Told] = {}

    def once(place: Place, size: int, between: str = "nothing", bf16: bool = False) -> Told:
        case = (place, size, between, bf16)
        if case not in known:
            known[case] = rank_pool(4).run(trained, place, str(folder), size, between, bf16)
        return known[case]

    return once


def check(run: Callable[..., Told], *case: Any) -> None:
    """Near gathers happen, change nothing, and give every rank the same."""
    place, *more = case
    (far, _, _), (near, payloads, _) = run(place, 1, *more)[0], run(place, 2, *more)[0]
    assert payloads[-1][NEAR], "no gather stayed inside a node: the run proves nothing"
    assert differences(near.tensors, far.tensors) == []
    assert near.norms == far.norms
    for other, _, _ in run(place, 2, *more):
        assert differences(other.tensors, near.tensors) == []


@pytest.mark.parametrize(
    ("place", "bf16"),
    [(PLACES[0], False), (PLACES[2], False), (PLACES[2], True)],
    ids=["device, fp32", "nvme, fp32", "nvme, bf16"],
)
def test_near_gathers_give_the_bits_of_far_ones(run: Callable[..., Told], place: Place, bf16: bool) -> None:
    check(run, place, "nothing", bf16)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_near_gathers_give_the_bits_of_far_ones_whatever_happens_between_steps(
    run: Callable[..., Told], place: Place, between: str, bf16: bool
) -> None:
    check(run, place, between, bf16)


def test_what_changes_weights_between_steps_reaches_near_gathers(run: Callable[..., Told]) -> None:
    check(run, PLACES[2], "all of it")


def test_only_the_first_gather_of_a_unit_after_a_step_goes_over_all_ranks(run: Callable[..., Told]) -> None:
    (_, far, _), (_, near, sizes) = run(PLACES[2], 1)[0], run(PLACES[2], 2)[0]
    for step in range(STEPS):
        trained_numel, numel = sizes["trained"], sizes["trained"] + sizes["frozen"]
        expected = (step + 1) * trained_numel + sizes["frozen"]
        assert near[step]["gather"] == expected, "once a step; frozen weights never change"
        assert near[step]["gather"] + near[step][NEAR] == far[step]["gather"]
        assert far[step]["gather"] >= 2 * (step + 1) * numel, "otherwise the run proves little"


def test_the_plan_has_a_row_for_a_second_share_of_the_weights(run: Callable[..., Told]) -> None:
    for size in (1, 2):
        for _, _, sizes in run(PLACES[2], size):
            assert sizes["near"] == (sizes["bytes"] // size if size > 1 else 0)


def told_at_start(place: Place, nvme_path: str, size: int) -> tuple[list[str], int]:
    """Lines of the log about hpZ, and planned bytes."""
    import zero

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        model = chain()
        with zero.initialize(model=model, config=config_of(place, nvme_path, size))[0] as engine:
            model.clamped.eval()  # one copy for all ranks is nothing that each of them may change
            engine.backward(engine(data(engine, 0)))
            if engine.statistics().payload_numel.get(NEAR):
                raise AssertionError("a gather stayed inside a node")
            planned = sum(row.nbytes for row in engine.plan.rows if row.array == "weights shared out inside nodes")
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "zero_hpz_partition_size" in line], planned


@pytest.mark.parametrize(
    ("place", "size", "reason"),
    [(Place(3), 2, "in shared host memory"), (PLACES[0], 4, "a group of all ranks"), (PLACES[0], 1, "")],
    ids=["shared host memory", "all ranks", "off"],
)
def test_where_it_has_nothing_to_add_one_line_says_why(
    rank_pool: Pool, nvme_path: Any, place: Place, size: int, reason: str
) -> None:
    for lines, planned in rank_pool(4).run(told_at_start, place, str(nvme_path), size):
        assert len(lines) == bool(reason) and all(reason in line for line in lines)
        assert planned == 0


# ---- groups of their own (MiCS) -------------------------------------------------------------------------------------


def trained_in_groups(size: int, params: str) -> dict[str, Tensor]:
    import zero

    with seeded(0):
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
    keys = {"stage": 3, "mics_shard_size": size, "stage3_param_persistence_threshold": 0}
    keys |= {"offload_param": {"device": params}, "offload_optimizer": {"device": "cpu"}}
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    config = {"train_micro_batch_size_per_gpu": 5, "optimizer": sgd, "zero_optimization": keys}
    with zero.initialize(model=model, config=config)[0] as engine:
        for index in range(2):
            engine.backward(engine(data(engine, index)).square().mean())
            engine.step()
        return {name: engine.full_master(name) for name, _ in engine.named_full_parameters()}


@pytest.mark.parametrize("params", ["none", "cpu"])
def test_groups_that_have_the_same_slices_update_each_of_them_once(rank_pool: Pool, params: str) -> None:
    """On one machine too, where all ranks could read one copy."""
    wanted = rank_pool(4).run(trained_in_groups, 4, params)[0]
    for found in rank_pool(4).run(trained_in_groups, 2, params):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
