"""Classes of transformers and peft on two ranks, each with its own text, against DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from models import seeded, tokens, trainability
from ranks import RankPool
from ranks_plain import Ddp, Late, Opposite, Outcome, beyond
from ranks_runs import CLIPPING, HYPER, Place, Run, engine_config, outcome_of, quiet
from reference import differences

pytestmark = pytest.mark.broad

pytest.importorskip("transformers")

Pool = Callable[[int], RankPool]

MODELS = ("GPT-2", "Llama", "MoE, packed experts (Mixtral)")
LORA = "LoRA (peft on Llama)"
TIERS = ("none", "cpu", "nvme")
STEPS = 5
LIVE = (("stage3_max_live_parameters", 60_000),)
CELLS = [(model, stage, tier) for model in MODELS for stage in (1, 2, 3) for tier in TIERS]
PAIRWISE = [(model, 1 + j, TIERS[(i + j) % 3]) for i, model in enumerate(MODELS) for j in range(3)]


def place_of(stage: int, tier: str) -> Place:
    return Place(stage, tier if stage == 3 else "none", tier, more=LIVE)


def build(name: str) -> Any:
    from support_models import ROWS

    with seeded(0):
        return ROWS[name].make(None)


def train(trainer: Any, run: Run) -> list[float]:
    norms, index = [], 0
    for _ in range(run.steps):
        for _ in range(run.accumulation):
            text = tokens(2 * index + dist.get_rank())
            with seeded(2 * index + dist.get_rank()):  # the same dropout on both sides
                loss = trainer(input_ids=text, labels=text).loss
                trainer.backward(loss)
            trainer.step()
            index += 1
        norms.append(trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm())
    return norms


def trained(name: str, run: Run, place: Place, nvme_path: str) -> Outcome:
    import zero

    quiet()
    model = build(name)
    names = trainability(model)
    with zero.initialize(model=model, config=engine_config(run, place, nvme_path))[0] as engine:
        return outcome_of(engine, names, train(engine, run))


def plain(name: str, run: Run) -> list[Outcome]:
    held = []
    for kind in (Ddp, Opposite, Late):
        trainer = kind(build(name), HYPER, run.accumulation, run.clipping)
        train(trainer, run)
        held.append(trainer.outcome())
    return held


@pytest.fixture(scope="module")
def expected(rank_pool: Pool) -> Callable[[str, Run], list[Outcome]]:
    known: dict[tuple[str, Run], list[Outcome]] = {}

    def ask(name: str, run: Run) -> list[Outcome]:
        if (name, run) not in known:
            known[name, run] = rank_pool(2).run(plain, name, run)[0]
        return known[name, run]

    return ask


def check(rank_pool: Pool, expected: Any, nvme_path: Any, name: str, run: Run, place: Place) -> None:
    ours = rank_pool(2).run(trained, name, run, place, str(nvme_path))
    assert differences(ours[0].tensors, ours[1].tensors) == [], "the ranks see different values"
    assert beyond(ours[0], *expected(name, run)) == []


@pytest.mark.parametrize(("name", "stage", "tier"), PAIRWISE)
def test_models_of_transformers_train_as_under_ddp(
    rank_pool: Pool, expected: Any, nvme_path: Any, name: str, stage: int, tier: str
) -> None:
    check(rank_pool, expected, nvme_path, name, Run(2, 1, CLIPPING, steps=STEPS), place_of(stage, tier))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "stage", "tier"), CELLS)
def test_models_of_transformers_train_as_under_ddp_wherever_their_bytes_live(
    rank_pool: Pool, expected: Any, nvme_path: Any, name: str, stage: int, tier: str, accumulation: int
) -> None:
    run = Run(2, accumulation, CLIPPING, steps=20)
    check(rank_pool, expected, nvme_path, name, run, place_of(stage, tier))


@pytest.mark.parametrize("tier", ["nvme", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("none", "cpu"))])
def test_lora_of_peft_trains_at_stage_3_as_under_ddp(rank_pool: Pool, expected: Any, nvme_path: Any, tier: str) -> None:
    pytest.importorskip("peft")
    check(rank_pool, expected, nvme_path, LORA, Run(2, 2, CLIPPING, steps=STEPS), place_of(3, tier))
