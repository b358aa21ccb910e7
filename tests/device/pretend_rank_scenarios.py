"""What several ranks train together, each with data of its own. They run the scenarios of one rank too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import models
import torch
from models import build
from pretend_scenarios import (
    FP16,
    SCENARIOS,
    STATES,
    STEPS,
    Place,
    Results,
    Scenario,
    batch,
    closing,
    kept,
    micro_batch,
    opened,
    scenario,
    sent,
    step,
    towers,
    training,
)

import zero

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOADED = {"accumulation": 2, "clipping": 0.1}

SCENARIOS |= {
    # One slice a group: gradients are reduced over replicas.
    "replicas": training(zero={"mics_shard_size": 1}),
    "replicas_loaded": training(zero={"mics_shard_size": 1}, **LOADED),
    "sums_in_rank_order": training(reduce_scatter_with_fp32_accumulation=True, **LOADED),
    "divided_before": training(prescale_gradients=True),
    "summed": training(gradient_allreduce_op="sum"),
    "one_after_the_other": training(zero={"overlap_comm": False}),
    "fp32_loaded": training(bf16=False, **LOADED),
    "fp16_loaded": training(bf16=False, fp16=FP16, **LOADED),
    "lora_loaded": training("lora", **LOADED),
    "partly_frozen_loaded": training("mixed", **LOADED),
    "states_half_on_the_device_loaded": training(zero={STATES: {"ratio": 0.5}}, **LOADED),
    # Each tower's gradients are made on a stream of its own, and reduced in an order that all ranks share.
    "towers_apart": towers(moving=True),
    "persistent": training(zero={"stage3_param_persistence_threshold": 2_000}, **LOADED),
    # Four ranks: two groups of slices, two replicas of each; and weights shared out a second time.
    "two_of_two": training(zero={"mics_shard_size": 2}, **LOADED),
    "near": training(zero={"zero_hpz_partition_size": 2}, **LOADED),
}


def at_stage(stage: int, **config: Any) -> Scenario:
    """Accumulation with `no_sync`, where gradients wait for the step on each rank."""

    def run(place: Place, folder: Path) -> Results:
        engine = opened("gpt", place, folder, accumulation=3, clipping=0.1, zero={"stage": stage}, **config)
        for index in range(2):
            with engine.no_sync():
                micro_batch(engine, 3 * index)
                micro_batch(engine, 3 * index + 1)
            micro_batch(engine, 3 * index + 2)
            engine.step()
        return closing(engine)

    return run


SCENARIOS |= {f"no_sync_{stage}": at_stage(stage) for stage in (0, 1, 2, 3)}


def branching(stage: int, *, apart: bool) -> Scenario:
    """A forward that leaves a block out; `apart`: not the same one on all ranks."""

    def run(place: Place, folder: Path) -> Results:
        engine = opened("branching", place, folder, clipping=0.1, zero={"stage": stage})
        for index in range(STEPS):
            branch = index // 2 + (RANK if apart else 0)
            engine.backward(engine(sent(batch(index), engine), branch=branch))
            engine.step()
        return closing(engine)

    return run


SCENARIOS |= {
    "left_out": branching(3, apart=False),
    "left_out_apart_0": branching(0, apart=True),
    "left_out_apart_1": branching(1, apart=True),
    "left_out_apart_2": branching(2, apart=True),
}


@scenario
def left_early(place: Place, folder: Path) -> Results:
    """Fewer blocks now and then."""
    engine = opened("early_exit", place, folder)
    for index, depth in enumerate((None, 1, None, 2, None)):
        engine.backward(engine(sent(batch(index), engine), depth=depth))
        engine.step()
    return closing(engine)


@scenario
def fetched_in_vain(place: Place, folder: Path) -> Results:
    """What a step has begun to fetch is let go before anybody uses it, and its memory is another unit's."""
    engine, found = opened("gpt", place, folder, clipping=0.1), {}
    for index in range(3):
        step(engine, index)
        engine.empty_partition_cache()
        with torch.no_grad():
            hidden = sent(torch.ones(2, 8, models.WIDTH, dtype=torch.bfloat16), engine)
            found[f"block {index}"] = engine.module.blocks[2](hidden)
    return closing(engine, {name: kept(value) for name, value in found.items()})


@scenario
def edited_by_the_first(place: Place, folder: Path) -> Results:
    """Only what the first rank writes counts, and only it writes."""
    model = build("gpt")
    engine = opened(model, place, folder, accumulation=2)
    for index in range(3):
        micro_batch(engine, 2 * index)
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if RANK == 0:
                for parameter in model.parameters():
                    parameter.data.mul_(1.01)
        micro_batch(engine, 2 * index + 1)
        engine.step()
    return closing(engine)


@scenario
def several_uses(place: Place, folder: Path) -> Results:
    """Gradients of one backward come in several times: a block used twice, recomputed."""
    engine = opened(build("reused", recompute="nonreentrant"), place, folder, accumulation=2)
    for index in range(STEPS):
        step(engine, index)
    return closing(engine)


@scenario
def generated_between(place: Place, folder: Path) -> Results:
    """Generation between micro-batches' steps, evaluation behind them, and a look at what a step has made."""
    engine, found = opened("gpt", place, folder), {}
    for index in range(2):
        step(engine, index)
        with engine.generation(), torch.no_grad():
            losses = [engine(sent(batch(50 + at), engine)) for at in range(3)]
        found |= {f"loss {index} {at}": kept(loss) for at, loss in enumerate(losses)}
        found[f"norm {index}"] = torch.tensor(float(engine.get_global_grad_norm()))
    return closing(engine, found)


@scenario
def evaluated_before_the_step(place: Place, folder: Path) -> Results:
    """The host asks for a step while the device is still to evaluate with the weights of before."""
    engine, losses = opened("gpt", place, folder), []
    for index in range(3):
        micro_batch(engine, index)
        with torch.no_grad():
            losses += [engine(sent(batch(50 + at), engine)) for at in range(3)]
        engine.step()
    return closing(engine, {f"loss {at}": kept(loss) for at, loss in enumerate(losses)})


@scenario
def given_back(place: Place, folder: Path) -> Results:
    """Files in memory that ranks share are mapped and open while an engine has them, and no longer."""

    def left() -> Results:
        mapped = Path("/proc/self/maps").read_text().count("memfd:zero-infinity")
        opened_files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
        return {
            "mapped": torch.tensor(mapped),
            "open": torch.tensor(sum("memfd:zero" in name for name in opened_files)),
        }

    before, engine = left(), opened("gpt", place, folder)
    step(engine, 0)
    found = closing(engine)
    return {**found, **{name: value - before[name] for name, value in left().items()}}


@scenario
def lora_saved_and_loaded(place: Place, folder: Path) -> Results:
    engine = opened("lora", place, folder, clipping=0.1)
    step(engine, 0)
    engine.save_checkpoint(folder / "saved")
    step(engine, 1)
    engine.load_checkpoint(folder / "saved")
    step(engine, 1)
    engine.offload_states()
    step(engine, 2)
    return closing(engine)
