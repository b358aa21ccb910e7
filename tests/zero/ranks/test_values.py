"""Whatever a rank asks for, all ranks hold the same model: rank 0's at first, and one truth afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters, train
from models import seeded, trainability
from pairwise import each_once
from ranks import RankPool
from ranks_model import Motley, batch, motley
from ranks_runs import Place, Run, engine_config, on_batch, opened
from reference import differences, snapshot

from offload.errors import StateError

Pool = Callable[[int], RankPool]
Values = dict[str, torch.Tensor]

PLACES = (
    Place(0), Place(1, "none", "nvme"), Place(2, "none", "cpu"), Place(3), Place(3, "cpu", "nvme"),
    Place(3, "nvme", "nvme"), Place(3, "nvme", "nvme", shared=False),
)  # fmt: skip
everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
STEPS = 3


def same(told: list[Values]) -> Values:
    """What every rank has told."""
    for other in told[1:]:
        assert differences(told[0], other) == []
    return told[0]


# ---- where values come from -------------------------------------------------------------------


def first_values(place: Place, nvme_path: str, construction: str) -> Values:
    """Masters right after initialize, of a model that each rank has built from a seed of its own."""
    import zero

    config = engine_config(Run(bf16=True), place, nvme_path)
    with seeded(100 + dist.get_rank()), zero.Init(config_dict_or_path=config, enabled=construction == "Init"):
        model = Motley()
    names = trainability(model)
    with opened(place, nvme_path, model, bf16=True) as engine:
        return masters(engine, [name for name, trainable in names if trainable])


@each_once(place=PLACES, construction=("Init", "in memory"))
def test_ranks_that_built_different_models_all_get_rank_0s(
    rank_pool: Pool, nvme_path: Any, place: Place, construction: str
) -> None:
    held = same(rank_pool(2).run(first_values, place, str(nvme_path), construction))
    with seeded(100):
        theirs = dict(Motley().named_parameters())
    assert differences(held, {name: theirs[name].detach() for name in held}) == []


# ---- asking for them --------------------------------------------------------------------------


def everything(place: Place, nvme_path: str) -> tuple[Values, Values, Values]:
    """What the engine tells of each parameter, what `state_dict` gives inside GatheredParameters, and its shapes."""
    import zero

    model = motley()
    names = trainability(model)
    shapes = {name: torch.tensor(value.shape) for name, value in model.state_dict().items()}
    with opened(place, nvme_path, model, bf16=True) as engine:
        train(engine, *range(STEPS), loss_of=on_batch)
        told = snapshot(engine, names)
        released = {name: torch.tensor(value.shape) for name, value in engine.module.state_dict().items()}
        if differences(released, shapes):
            raise AssertionError(f"released: {differences(released, shapes)}")
        with zero.GatheredParameters(list(model.parameters())):
            gathered = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        return told, gathered, dict(engine.named_full_parameters())


@everywhere
def test_full_values_and_state_dict_are_the_same_on_all_ranks(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    told = rank_pool(2).run(everything, place, str(nvme_path))
    values, gathered, named = (same([rank[i] for rank in told]) for i in range(3))
    assert gathered.keys() == motley().state_dict().keys() == named.keys()
    tied = {"head.weight": "table.weight"}
    weights = {name: values[f"{tied.get(name, name)}/weight"] for name in gathered}
    assert differences(gathered, weights) == []
    assert differences(named, weights) == []


# ---- editing them -----------------------------------------------------------------------------

EDITED = ("blocks.0.up.weight", "table.weight", "norm.bias", "frozen.weight")


def edited(place: Place, nvme_path: str, modifier_rank: int | None, wanted: tuple[str, ...]) -> Values:
    """Each rank writes its own number into some parameters after a few steps."""
    import zero

    model = motley()
    names = trainability(model)
    with opened(place, nvme_path, model, bf16=True) as engine:
        train(engine, *range(STEPS), loss_of=on_batch)
        parameters = [model.get_parameter(name) for name in wanted]
        with zero.GatheredParameters(parameters, modifier_rank=modifier_rank), torch.no_grad():
            for parameter in parameters:
                parameter.view(-1)[3:5] = 7.0 if modifier_rank is None else 7.0 + dist.get_rank()
        return snapshot(engine, names)


@each_once(place=PLACES, modifier_rank=(0, 1, None))
def test_an_edit_of_the_modifier_rank_reaches_all_ranks_and_the_masters(
    rank_pool: Pool, nvme_path: Any, place: Place, modifier_rank: int | None
) -> None:
    told = [((modifier_rank, EDITED)), (0, ())]
    held, untouched = (same(rank_pool(2).run(edited, place, str(nvme_path), *edits)) for edits in told)
    for name in EDITED:
        for plane in ("weight", "master"):
            if f"{name}/{plane}" in untouched:
                untouched[f"{name}/{plane}"].view(-1)[3:5] = 7.0 + (modifier_rank or 0)
    assert differences(held, untouched) == []


# ---- editing them before there is an engine ---------------------------------------------------


def edited_inside(place: Place, nvme_path: str, ranks: tuple[int | None, int | None]) -> tuple[Values, str]:
    """Rank 0 edits one parameter of a unit, rank 1 another, where they are the modifiers of two nested gathers."""
    import zero

    model, error = motley(), ""
    with opened(place, nvme_path, model, bf16=False) as engine:
        block = engine.module.blocks[0]
        parameters = (block.up.weight, block.up.bias)
        try:
            outer, inner = (zero.GatheredParameters(*gather) for gather in zip(parameters, ranks, strict=True))
            with outer, inner, torch.no_grad():
                for parameter, rank in zip(parameters, ranks, strict=True):
                    if rank == dist.get_rank():
                        parameter.fill_(7.0 + rank)
        except StateError as refused:
            error = str(refused)
        return {name: engine.full_parameter(f"blocks.0.up.{name}") for name in ("weight", "bias")}, error


@each_once(place=PLACES, ranks=((None, 0), (None, 1), (1, None), (0, 0), (0, 1)))
def test_the_modifier_of_a_gather_inside_another_counts(
    rank_pool: Pool, nvme_path: Any, place: Place, ranks: tuple[int | None, int | None]
) -> None:
    """Two ranks that both edit the unit are refused: one of the edits would be lost."""
    (values, refused), (others, also) = rank_pool(2).run(edited_inside, place, str(nvme_path), ranks)
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    for name, rank in zip(("weight", "bias"), ranks, strict=True):
        wanted = rank is not None and ranks != (0, 1)
        assert bool((values[name] == 7.0 + (rank or 0)).all()) == wanted, (name, values[name])
    assert bool(refused) == bool(also) == (ranks == (0, 1))


def edited_before(place: Place, nvme_path: str, modifier_rank: int) -> tuple[Values, Values]:
    """What each rank sees after its edit of a model that `Init` has seen, and what an engine takes up."""
    import zero
    from zero.compat.partition_parameters import Init

    config = engine_config(Run(bf16=True), place, nvme_path)
    with seeded(100 + dist.get_rank()), Init(config_dict_or_path=config):
        model = Motley()
    parameters = [model.get_parameter(name) for name in EDITED]
    with zero.GatheredParameters(parameters, modifier_rank=modifier_rank), torch.no_grad():
        for parameter in parameters:
            parameter.view(-1)[3:5] = 7.0 + dist.get_rank()
    with zero.GatheredParameters(parameters):
        seen = {name: p.detach().clone() for name, p in zip(EDITED, parameters, strict=True)}
    with opened(place, nvme_path, model, bf16=True) as engine:
        return seen, {name: engine.full_master(name) for name in EDITED if name != "frozen.weight"}


@each_once(place=(Place(0), Place(3), Place(3, "nvme", "nvme")), modifier_rank=(0, 1))
def test_an_edit_before_initialize_is_the_modifier_ranks_on_all(
    rank_pool: Pool, nvme_path: Any, place: Place, modifier_rank: int
) -> None:
    told = rank_pool(2).run(edited_before, place, str(nvme_path), modifier_rank)
    seen, held = same([before for before, _ in told]), same([after for _, after in told])
    for values in (seen, held):
        assert all(torch.all(value.view(-1)[3:5] == 7.0 + modifier_rank) for value in values.values())
    assert all(torch.equal(held[name].to(seen[name].dtype), seen[name]) for name in held)


@each_once(place=(Place(0), Place(3), Place(3, "nvme", "nvme")))
def test_a_modifier_rank_that_is_none_is_an_error_before_initialize_too(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    for told in rank_pool(2).run(edited_before, place, str(nvme_path), 2, errors="return"):
        assert "modifier_rank from 0 to 1" in str(told)


# ---- gradients that somebody has written ------------------------------------------------------


def written(place: Place, nvme_path: str, by_hand: bool) -> Values:
    """All ranks put the same into some gradients after a backward: into `.grad`, or by the call for it."""
    from zero import utils

    model = motley()
    names = trainability(model)
    with opened(place, nvme_path, model, bf16=True) as engine:
        engine.backward(engine(batch(0, dist.get_rank(), agreed=True)))
        for seed, name in enumerate(("blocks.0.up.weight", "table.weight", "norm.bias")):
            parameter = model.get_parameter(name)
            with seeded(seed):
                value = torch.randn(parameter.shape).to(parameter.dtype)
            if by_hand:
                parameter.grad = value
            else:
                utils.safe_set_full_grad(parameter, value)
        engine.step()
        return snapshot(engine, names)


@each_once(place=PLACES)
def test_written_gradients_count_on_every_rank(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    by_hand, told = (same(rank_pool(2).run(written, place, str(nvme_path), way)) for way in (True, False))
    assert differences(by_hand, told) == []
