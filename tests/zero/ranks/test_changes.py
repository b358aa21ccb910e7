"""Models that change after `initialize` on several ranks train as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import LoraLinear, seeded
from ranks import RankPool
from ranks_model import batch, motley
from ranks_plain import Ddp, Opposite, Outcome, beyond
from ranks_runs import HYPER, Place, Run, engine_config, outcome_of, quiet
from reference import differences, snapshot
from torch import nn

from offload.errors import StateError
from zero.params.released_parameter import is_managed

Pool = Callable[[int], RankPool]

LIVE = (("stage3_max_live_parameters", 90_000),)
"""With adapters too a block is one unit: no unit is one that only some ranks use."""
PLACES = (
    Place(0), Place(1, "none", "cpu"), Place(2, "none", "nvme"), Place(3), Place(3, "nvme", "nvme", more=LIVE),
    Place(3, "cpu", "nvme", shared=False, more=LIVE), Place(3, "nvme", "nvme", shared=False, more=LIVE),
    Place(3, "nvme", "nvme", more=(("mics_shard_size", 1),)), Place(2, shared=False, more=LIVE),
)  # fmt: skip


def everywhere(*usual: int) -> Any:
    """All places; those that are not `usual` in the long form only."""
    marks = {False: pytest.mark.slow, True: ()}
    places = [pytest.param(place, marks=marks[number in usual]) for number, place in enumerate(PLACES)]
    return pytest.mark.parametrize("place", places, ids=lambda place: place.name)


def adapt(model: Any, seed: int) -> None:
    """Adapters come, of a value that each rank has drawn for itself."""
    with seeded(seed):
        model.blocks[0].up = LoraLinear(model.blocks[0].up)
        model.blocks[1].down = LoraLinear(model.blocks[1].down)


def thaw(model: Any, seed: int) -> None:
    model.frozen.requires_grad_(True)
    model.blocks[1].requires_grad_(False)


def prune(model: Any, seed: int) -> None:
    model.unused, model.blocks[0].up = nn.Identity(), model.blocks[0].up.base
    model.blocks[1].requires_grad_(True)


CHANGES = (adapt, thaw, prune)


def follow(trainer: Any) -> None:
    """Plain torch takes up a change by hand, as the engine does by itself."""
    groups = trainer.optimizer.param_groups
    known = {id(p) for group in groups for p in group["params"]}
    groups[0]["params"] += [p for p in trainer.model.parameters() if p.requires_grad and id(p) not in known]
    known |= {id(p) for p in groups[0]["params"]}
    trainer.trained = {name: p for name, p in trainer.model.named_parameters() if id(p) in known}
    if isinstance(trainer, Ddp):
        trainer.callable = nn.parallel.DistributedDataParallel(trainer.model, find_unused_parameters=True)


def train(trainer: Any, model: Any, changed: Callable[[int], int]) -> list[float]:
    """Two steps before each change and two after the last; `changed(rank)` is a rank's seed."""
    norms = []
    for step in range(2 * len(CHANGES) + 2):
        if step and step % 2 == 0:
            CHANGES[step // 2 - 1](model, changed(dist.get_rank()))
            if hasattr(trainer, "norms"):
                follow(trainer)
        trainer.backward(trainer(batch(step, dist.get_rank(), agreed=True)))
        trainer.step()
        norms.append(trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm())
    return norms


def plain(_: Any = None) -> tuple[list[Outcome], tuple[tuple[str, bool], ...]]:
    held = []
    for kind in (Ddp, Opposite):
        trainer = kind(motley(), HYPER)
        train(trainer, trainer.model, lambda rank: 11)
        held.append(trainer.outcome())
    return held, tuple((name, name in trainer.trained) for name, _ in trainer.model.named_parameters())


def trained(place: Place, nvme_path: str, names: tuple[tuple[str, bool], ...]) -> Outcome:
    import zero

    quiet()
    model = motley()
    pruned = model.unused.weight
    with zero.initialize(model=model, config=engine_config(Run(agreed=True), place, nvme_path))[0] as engine:
        held = outcome_of(engine, names, train(engine, model, lambda rank: 11 + rank))
        if is_managed(pruned) or not torch.equal(pruned, motley().unused.weight):
            raise AssertionError("what has left the model has not got its values")
    return held


@pytest.fixture(scope="module")
def expected(rank_pool: Pool) -> tuple[list[Outcome], tuple[tuple[str, bool], ...]]:
    return rank_pool(2).run(plain)[0]


@everywhere(0, 2, 4, 6)
def test_adapters_thawing_and_pruning_train_as_under_ddp(
    rank_pool: Pool, expected: Any, nvme_path: Any, place: Place
) -> None:
    outcomes, names = expected
    told = rank_pool(2).run(trained, place, str(nvme_path), names)
    assert beyond(told[0], *outcomes) == []
    assert differences(told[0].tensors, told[1].tensors) == []


def kept(place: Place, nvme_path: str) -> list[dict[str, torch.Tensor]]:
    """What bf16 weights, masters and moments were before changes and are after them, of what was trained before."""
    import zero

    quiet()
    model = motley()
    names = [(name, p.requires_grad) for name, p in model.named_parameters()]
    moved = {"blocks.0.up.": "blocks.0.up.base.", "blocks.1.down.": "blocks.1.down.base."}
    with zero.initialize(model=model, config=engine_config(Run(bf16=True), place, nvme_path))[0] as engine:
        for step in range(2):
            engine.backward(engine(batch(step, dist.get_rank(), agreed=True)))
            engine.step()
        held = [snapshot(engine, names)]
        for change in (adapt, thaw):
            change(model, 11)
            if not engine.replan():
                raise AssertionError("nothing has changed")
            after = [(name, name in dict(names) or "base" in name) for name, _ in model.named_parameters()]
            told = snapshot(engine, [(name, True) for name, old in after if old and "frozen" not in name])
            for old, new in moved.items():
                told = {key.replace(new, old): value for key, value in told.items()}
            held.append(told)
        return held


@everywhere(1, 4, 5)
def test_what_stays_keeps_every_bit(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    for before, *afterwards in rank_pool(2).run(kept, place, str(nvme_path)):
        before = {key: value for key, value in before.items() if "frozen" not in key}
        for after in afterwards:
            assert differences(after, before) == []


def refusals(place: Place, nvme_path: str) -> list[str]:
    """Messages, and then the engine goes on."""
    import zero

    quiet()
    model: Any = motley()
    told = []
    with zero.initialize(model=model, config=engine_config(Run(2), place, nvme_path))[0] as engine:
        engine.backward(engine(batch(0, dist.get_rank(), agreed=True)))
        adapt(model, 11)
        try:
            engine.replan()
        except StateError as error:
            told.append(str(error))
        engine.zero_grad()
        model.extra = nn.Linear(3, 4 + dist.get_rank())
        try:
            engine.replan()
        except StateError as error:
            told.append(str(error))
        del model.extra
        engine.backward(engine(batch(1, dist.get_rank(), agreed=True)))
        engine.step()
        if not engine.full_state("blocks.0.up.low")["step"]:
            raise AssertionError("the adapters are not trained")
    return told


@pytest.mark.parametrize("place", [PLACES[3], PLACES[6]], ids=lambda place: place.name)
def test_changes_amid_a_step_and_changes_that_differ_are_refused_on_all_ranks(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    for amid, differs in rank_pool(2).run(refusals, place, str(nvme_path)):
        assert "ranks 0, 1 have gradients" in amid
        assert "rank 0: extra.weight [4, 3]" in differs and "rank 1: extra.weight [5, 3]" in differs
