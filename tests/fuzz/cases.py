"""A seed becomes a case: a model of odd blocks, a configuration, and a script of operations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from fuzz.blocks import BLOCKS, WAYS, made
from fuzz.optimizers import OPTIMIZERS
from ranks_runs import Place, Run

from offload.sizes import BLOCK_NUMEL

OPERATIONS_MIN, OPERATIONS_MAX = 5, 12
PLACES = 3
LIVE_UNITS = 8
"""What one call of a model may use: its own units, those that it borrows, and a block's."""
BUDGET_SHARE = 0.3


class Op(NamedTuple):
    """One operation: a method of both sides, and what it is given."""

    kind: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Case:
    """What both sides run.

    Attributes:
        places: where bytes live: the first to begin with, the others after a resume.
        alias: units may be used where they lie.
        optimizer: by its name.
    """

    seed: int
    blocks: tuple[str, ...]
    ways: tuple[str, ...]
    run: Run
    places: tuple[Place, ...]
    alias: bool
    ops: tuple[Op, ...]
    optimizer: str

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {', '.join(self.blocks)}; {', '.join(self.ways) or 'no ways'}"]
        lines[0] += f"; {self.run.name}; {self.optimizer}"
        lines += [f"  {'at first' if i == 0 else f'place {i}'}: {place.name}" for i, place in enumerate(self.places)]
        return "\n".join([*lines, *(f"  {op.kind}{op.args}" for op in self.ops)])


WEIGHTS = {
    "train": 14, "evaluate": 2, "alone": 1, "stumble": 1, "forget": 1, "zero_grad": 1, "edit": 4, "look": 1,
    "read_one": 2, "read_all": 1, "set_full": 3, "set_local": 2, "resume": 2, "save": 1, "load": 2, "set_lr": 1,
    "freeze": 1, "thaw": 2, "offload": 1, "empty_cache": 1,
}  # fmt: skip
TRAINED_BY = {"engine": 4, "bare": 3, "scaled": 2, "two losses": 1, "two backwards": 1}
PLANES = ("master", "first state", "second state", "grad")
"""Where there is one state only, it is the second too."""


def drawn(seed: int, ranks: int) -> Case:
    """The case of a seed at a number of ranks; equal seeds give equal cases, everywhere."""
    rng = random.Random(f"{seed} {ranks}")
    run = Run(ranks, rng.choice((1, 1, 2, 3, 4)), rng.choice((0.0, 0.0, 0.3, 3.0)), bf16=rng.random() < 0.7)
    names = sorted(name for name in BLOCKS if not (run.bf16 and name == "batched"))
    blocks = tuple(rng.choice(names) for _ in range(rng.randint(2, 6)))
    ways = tuple(way for way in WAYS if rng.random() < 0.3)
    count = rng.randint(OPERATIONS_MIN, OPERATIONS_MAX)
    ops = tuple(op for _ in range(count) for op in _phrase(rng, blocks, ways, run))[:OPERATIONS_MAX]
    places = tuple(_place(rng, run) for _ in range(PLACES))
    alias = rng.random() < 0.7
    # Of a generator of its own: what was drawn of a seed before there were several is drawn still.
    weights = [optimizer.weight for optimizer in OPTIMIZERS.values()]
    optimizer = random.Random(f"optimizer {seed} {ranks}").choices(list(OPTIMIZERS), weights)[0]
    return Case(seed, blocks, ways, run, places, alias, ops, optimizer)


def _phrase(rng: random.Random, blocks: tuple[str, ...], ways: tuple[str, ...], run: Run) -> list[Op]:
    """An operation; or an edit right behind a step whose updates are due, and a forward right behind the edit."""
    op = _op(rng, blocks, ways, run)
    if op.kind != "edit" or rng.random() < 0.2:
        return [op]
    return [*(Op("train", ("engine", 0)) for _ in range(run.accumulation)), op, Op("evaluate", (0,))]


def _op(rng: random.Random, blocks: tuple[str, ...], ways: tuple[str, ...], run: Run) -> Op:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    name = rng.choice([name for name, _ in made(blocks, ways).named_parameters() if name != "position"])
    factor = rng.choice((0.5, 0.75, -1.0, 2.0))
    args: dict[str, tuple[Any, ...]] = {
        "train": (rng.choices(list(TRAINED_BY), list(TRAINED_BY.values()))[0], rng.randrange(3)),
        "evaluate": (rng.randrange(3),),
        "alone": (rng.randrange(len(blocks)), rng.randrange(3)),
        "stumble": (rng.randrange(len(blocks)),),
        "forget": (rng.randrange(3),),
        "edit": (name, factor, rng.choice((None, 0, -1)), rng.randrange(run.ranks)),
        "look": (name,),
        "read_one": (name,),
        "set_full": (name, rng.choice(PLANES), factor),
        "set_local": (name, rng.choice(PLANES), factor),
        "set_lr": (rng.choice((1e-3, 3e-3, 2e-2)),),
        "freeze": (name,),
        "thaw": (name if rng.random() < 0.5 else None,),
        "resume": (rng.randrange(1, PLACES),),
        "offload": (rng.choice((None, "lp_params", "optim_states", "lp_grads")), rng.random() < 0.5),
    }
    return Op(kind, args.get(kind, ()))


def _place(rng: random.Random, run: Run) -> Place:
    stage = rng.choice((0, 1, 2, 3, 3, 3, 3))
    tiers = ("none", "cpu", "nvme", "nvme")
    params = rng.choice(tiers) if stage == 3 else "none"
    states = rng.choice(tiers) if stage else "none"
    more: dict[str, Any] = {
        "stage3_max_live_parameters": rng.choice((LIVE_UNITS * BLOCK_NUMEL * run.ranks, 1_000_000_000)),
        "stage3_prefetch_bucket_size": rng.choice((0, 0, 1_500, 1_000_000)),
        "stage3_max_reuse_distance": rng.choice((0, 0, 1_000_000_000)),
        "stage3_param_persistence_threshold": rng.choice((0, 0, 100, 100_000)),
        "sub_group_size": rng.choice((512, 512, 4_096, 1_000_000_000)),
    }
    cached = BUDGET_SHARE if "nvme" in (params, states) and rng.random() < 0.2 else None
    shared = run.ranks == 1 or rng.random() < 0.75
    return Place(stage, params, states, shared, cached, tuple(sorted(more.items())))
