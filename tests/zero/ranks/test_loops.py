"""Loops that users write around several ranks give what DistributedDataParallel gives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import masters
from models import seeded, trainability
from ranks import RankPool
from ranks_model import batch, motley
from ranks_plain import Ddp, Opposite, Outcome, Plain, beyond
from ranks_runs import CLIPPING, HYPER, Place, Run, engine_config, outcome_of, quiet
from reference import differences
from safetensors.torch import save_file
from torch import nn

from offload.errors import StateError

pytestmark = pytest.mark.broad

Pool = Callable[[int], RankPool]

STEPS = 4
PLACES = (Place(0), Place(1, "none", "cpu"), Place(2, "none", "nvme"), Place(3, "nvme", "nvme"))
of_every_stage = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"stage {place.stage}")


KNOWN: dict[Any, tuple[Outcome, Outcome]] = {}


def both(rank_pool: Pool, run: Run, job: Callable[..., Any], *args: Any) -> tuple[Outcome, Outcome]:
    """Rank 0's outcome of DDP and of the opposite order; `job(trainer, *args)` is the loop. Kept."""
    if (run, job, args) not in KNOWN:
        told = [rank_pool(run.ranks).run(run_plain, kind, run, job, *args)[0] for kind in (Ddp, Opposite)]
        KNOWN[run, job, args] = told[0], told[1]
    return KNOWN[run, job, args]


def run_plain(kind: type, run: Run, job: Callable[..., Any], *args: Any) -> Outcome:
    trainer = kind(motley(), HYPER, run.accumulation, run.clipping)
    job(trainer, *args)
    return trainer.outcome()


def run_engine(run: Run, place: Place, nvme_path: str, job: Callable[..., Any], *args: Any) -> Outcome:
    return run_engine_with({}, run, place, nvme_path, job, *args)


def run_engine_with(
    more: dict[str, Any], run: Run, place: Place, nvme_path: str, job: Callable[..., Any], *args: Any
) -> Outcome:
    import zero

    quiet()
    model = motley()
    names = trainability(model)
    with zero.initialize(model=model, config={**engine_config(run, place, nvme_path), **more})[0] as engine:
        return outcome_of(engine, names, job(engine, *args))


def norm_of(trainer: Any) -> float:
    return trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm()


# ---- no_sync ----------------------------------------------------------------------------------


def accumulate(trainer: Any, micro_steps: int, no_sync: str) -> list[float]:
    """`no_sync`: "never", around "backward" of all but the last micro-batch, or around "all" of it, step() too."""
    norms, index = [], 0
    quietly = getattr(trainer, "no_sync", contextlib.nullcontext)
    for _ in range(STEPS):
        for micro in range(micro_steps):
            last = micro == micro_steps - 1 or no_sync == "never"
            with contextlib.nullcontext() if last else quietly():
                trainer.backward(trainer(batch(index, dist.get_rank())))
                if no_sync == "all":
                    trainer.step()
            if no_sync != "all":
                trainer.step()
            index += 1
        norms.append(norm_of(trainer))
    return norms


@of_every_stage
def test_no_sync_changes_where_gradients_meet_and_no_number(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    run = Run(2, 3, CLIPPING, steps=STEPS)
    one, other = both(rank_pool, run, accumulate, 3, "never")
    held = {}
    for no_sync in ("never", "backward", "all"):
        held[no_sync] = rank_pool(2).run(run_engine, run, place, str(nvme_path), accumulate, 3, no_sync)[0]
        assert beyond(held[no_sync], one, other) == [], no_sync
    if place.stage >= 2:  # gradients are sharded, so they meet in each backward whatever the loop says
        assert differences(held["backward"].tensors, held["never"].tensors) == []
    assert differences(held["backward"].tensors, held["all"].tensors) == []


def backwards_before_a_step(trainer: Any, micro_steps: int) -> list[float]:
    """Whoever calls step() means it; a trainer that counts is called as it asks to be."""
    norms, index = [], 0
    for _ in range(STEPS):
        for micro in range(micro_steps):
            trainer.backward(trainer(batch(index, dist.get_rank())))
            if isinstance(trainer, Plain) or micro == micro_steps - 1:
                trainer.step()
            index += 1
        norms.append(norm_of(trainer))
    return norms


@of_every_stage
def test_a_loop_that_counts_itself_steps_whenever_it_says(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    run = Run(2, 3, CLIPPING, steps=STEPS)
    one, other = both(rank_pool, run, backwards_before_a_step, 3)
    more = {"managed_gradient_accumulation": False}
    ours = rank_pool(2).run(run_engine_with, more, run, place, str(nvme_path), backwards_before_a_step, 3)
    assert beyond(ours[0], one, other) == []
    assert differences(ours[0].tensors, ours[1].tensors) == []


def batches_one_of_which_fails(engine: Any, fails: bool) -> list[float]:
    """On all ranks, in the forward of its second micro-batch."""

    def stream(first: int) -> Any:
        return (batch(index, dist.get_rank()) for index in range(first, 1000))

    def second_fails(micro_batch: Any) -> Any:
        called.append(1)
        if len(called) == 2:
            raise ArithmeticError("no loss")
        return engine(micro_batch)

    called: list[int] = []
    norms = []
    for first in (0, 3, 6):
        if fails and first == 3:
            with pytest.raises(ArithmeticError):
                engine.train_batch(stream(50), second_fails)
            with pytest.raises(StateError, match="some gradients are missing"):
                engine.train_batch(stream(60), engine)
            engine.zero_grad()
        engine.train_batch(stream(first), engine)
        norms.append(norm_of(engine))
    return norms


@of_every_stage
def test_gradients_of_a_whole_batch_that_fails_on_all_ranks_are_in_no_step(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    run = Run(2, 3, CLIPPING)
    one, other = (
        rank_pool(2).run(run_engine, run, place, str(nvme_path), batches_one_of_which_fails, fails)[0]
        for fails in (True, False)
    )
    assert differences(one.tensors, other.tensors) == []


# ---- sums ---------------------------------------------------------------------------------------


def losses_times(trainer: Any, factor: float) -> list[float]:
    norms = []
    for index in range(STEPS):
        trainer.backward(trainer(batch(index, dist.get_rank(), agreed=True)) * factor)
        trainer.step()
        norms.append(norm_of(trainer))
    return norms


@pytest.mark.parametrize("place", (*PLACES, Place(3, shared=False)), ids=lambda place: place.name)
def test_a_sum_over_ranks_is_the_mean_times_their_number(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    """Twice the loss gives twice the gradients, to the bit."""
    run, held = Run(2, clipping=CLIPPING, steps=STEPS), []
    for op, factor in (("sum", 1.0), ("mean", 2.0), ("mean", 1.0)):
        more = {"gradient_allreduce_op": op}
        held.append(rank_pool(2).run(run_engine_with, more, run, place, str(nvme_path), losses_times, factor)[0])
    assert differences(held[0].tensors, held[1].tensors) == [] and held[0].norms == held[1].norms
    assert held[0].norms != held[2].norms


# ---- batches that are not alike ---------------------------------------------------------------


def uneven_samples(trainer: Any, micro_steps: int) -> list[float]:
    """The last micro-batch of an epoch is smaller, on one rank more so than on the other."""
    norms, index = [], 0
    for step in range(STEPS):
        for micro in range(micro_steps):
            is_last = step % 3 == 2 and micro == micro_steps - 1
            samples = 1 + dist.get_rank() if is_last else 3
            trainer.backward(trainer(batch(index, dist.get_rank(), samples=samples)))
            trainer.step()
            index += 1
        norms.append(norm_of(trainer))
    return norms


@of_every_stage
def test_a_last_batch_with_fewer_samples_on_one_rank_equals_ddp(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    run = Run(2, 2, CLIPPING, steps=STEPS)
    one, other = both(rank_pool, run, uneven_samples, 2)
    ours = rank_pool(2).run(run_engine, run, place, str(nvme_path), uneven_samples, 2)
    assert beyond(ours[0], one, other) == []
    assert differences(ours[0].tensors, ours[1].tensors) == []


def two_losses(trainer: Any, together: bool) -> list[float]:
    """Two losses of one graph: in two backwards, or added up where DDP can only do one."""
    norms = []
    for step in range(STEPS):
        first = trainer(batch(step, dist.get_rank()))
        second = 0.5 * first.square()
        if together:
            trainer.backward(first + second)
        else:
            trainer.backward(first, retain_graph=True)
            trainer.backward(second)
        trainer.step()
        norms.append(norm_of(trainer))
    return norms


@of_every_stage
def test_two_backwards_of_one_graph_equal_one_of_the_sum(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    run = Run(2, 1, CLIPPING, steps=STEPS)
    one = both(rank_pool, run, two_losses, True)[0]
    other = rank_pool(2).run(run_plain, Opposite, run, two_losses, False)[0]
    ours = rank_pool(2).run(run_engine, run, place, str(nvme_path), two_losses, False)[0]
    assert beyond(ours, one, other) == []


# ---- one rank does more -----------------------------------------------------------------------


def evaluating(trainer: Any, evaluations: int) -> list[float]:
    """Rank 0 evaluates between steps while the other waits."""
    norms = []
    for step in range(STEPS):
        trainer.backward(trainer(batch(step, dist.get_rank())))
        trainer.step()
        norms.append(norm_of(trainer))
        if dist.get_rank() == 0 and evaluations:
            trainer.eval()
            with torch.no_grad():
                losses = [trainer(batch(100 + i, i)).item() for i in range(evaluations)]
            trainer.train()
            if not all(torch.isfinite(torch.tensor(losses))):
                raise AssertionError(f"step {step}: evaluation gave {losses}")
        dist.barrier()
    return norms


COLLECTIVE = (Place(0, shared=False), *(Place(stage, "none", "cpu", shared=False) for stage in (1, 2)))


@pytest.mark.parametrize("place", (*PLACES, *COLLECTIVE), ids=lambda place: place.name)
def test_rank_0_may_evaluate_alone_where_it_has_or_can_read_all_weights(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    run = Run(2, 1, CLIPPING, steps=STEPS)
    held = [rank_pool(2).run(run_engine, run, place, str(nvme_path), evaluating, n)[0] for n in (0, 3)]
    assert differences(held[0].tensors, held[1].tensors) == []
    assert held[0].norms == held[1].norms


def write_weights(engine: Any, folder: str) -> None:
    values = {name: engine.full_parameter(name) for name, _ in engine.module.named_parameters()}
    if dist.get_rank() == 0:
        Path(folder).mkdir(exist_ok=True)
        save_file(values, f"{folder}/model.safetensors")
    dist.barrier()


def evaluating_alone_after_a_load(engine: Any, folder: str, how: str) -> list[float]:
    """Rank 0 evaluates what it has loaded, while the other ranks wait behind a barrier."""
    from zero import load_pretrained

    train_some = partial(trained, engine)
    train_some(0)
    if how == "checkpoint":
        engine.save_checkpoint(folder, "now")
    else:
        write_weights(engine, f"{folder}/weights")
    train_some(1)
    engine.load_checkpoint(folder, "now") if how == "checkpoint" else load_pretrained(engine, f"{folder}/weights")
    loss = 0.0
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss = float(engine(batch(9, 0)))
    dist.barrier()
    train_some(2)
    return [loss]


def trained(engine: Any, index: int) -> None:
    engine.backward(engine(batch(index, dist.get_rank())))
    engine.step()


@pytest.mark.parametrize("how", ["checkpoint", "weights"])
@pytest.mark.parametrize("place", [Place(1, shared=False), Place(2, "none", "cpu", shared=False), Place(3)])
@pytest.mark.timeout(120)
def test_rank_0_may_evaluate_alone_right_behind_a_load(
    rank_pool: Pool, nvme_path: Any, tmp_path: Any, place: Place, how: str
) -> None:
    run = Run(2, 1, CLIPPING, steps=3)
    rank_pool(2).run(run_engine, run, place, str(nvme_path), evaluating_alone_after_a_load, str(tmp_path), how)


def loading_beside_an_evaluation(engine: Any, folder: str, slow: bool) -> list[float]:
    """Rank 0 is still evaluating when rank 1 loads other weights."""
    from zero import load_pretrained

    trained(engine, 0)
    write_weights(engine, f"{folder}/weights")
    trained(engine, 1)
    handle = None
    if slow:
        handle = next(engine.module.children()).register_forward_hook(lambda *_: time.sleep(0.5))
    loss = 0.0
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss = float(engine(batch(9, 0)))
    if not slow:
        dist.barrier()
    load_pretrained(engine, f"{folder}/weights")
    if handle is not None:
        handle.remove()
    dist.barrier()
    return [loss]


@pytest.mark.timeout(120)
def test_a_load_waits_for_ranks_that_still_use_the_weights(rank_pool: Pool, nvme_path: Any, tmp_path: Any) -> None:
    run = Run(2, 1, CLIPPING, steps=3)
    losses = [
        rank_pool(2)
        .run(
            run_engine, run, Place(3, "cpu", "cpu"), str(nvme_path), loading_beside_an_evaluation, str(tmp_path), slow
        )[0]
        .norms
        for slow in (False, True)
    ]
    assert losses[0] == losses[1]


# ---- buffers ----------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two batch norms, one of which only rank 1 calls, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 23)
        self.norm = nn.BatchNorm1d(23)
        self.second = nn.Linear(23, 31)
        self.late = nn.BatchNorm1d(31)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        if dist.get_rank():
            x = self.late(x)
        with torch.no_grad():
            self.seen += torch.tensor([1, dist.get_rank(), 0])
        return x.square().mean()


def normed_batch(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    return torch.randn(5, 19, generator=generator) * (1 + dist.get_rank())


def buffers_after(place: Place | None, nvme_path: str) -> dict[str, torch.Tensor]:
    """Buffers of this rank after a few steps of the engine (None: of DDP)."""
    import zero

    quiet()
    with seeded(dist.get_rank()):
        model = Normed()
        model.norm.running_mean.normal_()  # ranks begin with different ones: rank 0's count
    trainer: Any = Ddp(model, HYPER)
    if place is not None:
        trainer = zero.initialize(model=model, config=engine_config(Run(), place, nvme_path))[0]
    with trainer if place is not None else contextlib.nullcontext():
        for step in range(STEPS):
            trainer.backward(trainer(normed_batch(step)))
            trainer.step()
        return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@of_every_stage
def test_buffers_are_rank_0s_before_each_training_forward_as_under_ddp(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    ours = rank_pool(2).run(buffers_after, place, str(nvme_path))
    theirs = rank_pool(2).run(buffers_after, None, str(nvme_path))
    for rank in range(2):
        assert ours[rank].keys() == theirs[rank].keys()
        for name, buffer in ours[rank].items():
            torch.testing.assert_close(buffer, theirs[rank][name], rtol=1e-5, atol=1e-6, msg=f"rank {rank}: {name}")


def buffers_before_and_after_a_change(place: Place, nvme_path: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Buffers of this rank before and after a layer begins to train and another, with a buffer, comes."""
    import zero

    quiet()
    with seeded(3):
        model = Normed()
    model.first.requires_grad_(False)
    with zero.initialize(model=model, config=engine_config(Run(), place, nvme_path))[0] as engine:
        engine.backward(engine(normed_batch(0)))
        engine.step()
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        model.first.requires_grad_(True)
        model.came = nn.BatchNorm1d(3)
        model.came.running_mean += dist.get_rank()
        assert engine.replan()
        return before, {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@of_every_stage
def test_a_change_of_the_model_shares_only_the_buffers_that_came_with_it(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    answers = rank_pool(2).run(buffers_before_and_after_a_change, place, str(nvme_path))
    assert not torch.equal(answers[0][0]["norm.running_mean"], answers[1][0]["norm.running_mean"])
    for before, after in answers:
        assert {name for name in after if name not in before} == {f"came.{own}" for own in nn.BatchNorm1d(3)._buffers}
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert not after["came.running_mean"].any()


def two_forwards(place: Place, nvme_path: str) -> dict[str, torch.Tensor]:
    """Weights of this rank after steps with two forwards before their one backward."""
    import zero

    quiet()
    with seeded(3):
        model = Normed()
    with zero.initialize(model=model, config=engine_config(Run(), place, nvme_path))[0] as engine:
        for step in range(STEPS):
            engine.backward(engine(normed_batch(2 * step)) + engine(normed_batch(2 * step + 1)))
            engine.step()
        return dict(engine.named_full_parameters())


@of_every_stage
def test_a_model_with_batch_norms_is_called_twice_before_its_backward(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    """DistributedDataParallel dies here, for it writes the buffers that the first graph holds."""
    ours = rank_pool(2).run(two_forwards, place, str(nvme_path))
    theirs = rank_pool(2).run(two_plain_forwards)
    for rank in range(2):
        for name, value in theirs[rank].items():
            torch.testing.assert_close(ours[rank][name], value, rtol=1e-4, atol=1e-5, msg=f"rank {rank}: {name}")


def two_plain_forwards() -> dict[str, torch.Tensor]:
    """The same by hand. No weight depends on the statistics."""
    quiet()
    with seeded(3):
        trainer = Opposite(Normed(), HYPER)
    for step in range(STEPS):
        trainer.backward(trainer(normed_batch(2 * step)) + trainer(normed_batch(2 * step + 1)))
        trainer.step()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


# ---- loss.backward() --------------------------------------------------------------------------


def in_turns(place: Place, nvme_path: str, bare: bool) -> dict[str, torch.Tensor]:
    import zero

    quiet()
    run = Run(accumulation=2, bf16=True)
    model = motley()
    with zero.initialize(model=model, config=engine_config(run, place, nvme_path))[0] as engine:
        for index in range(4):
            loss = engine(batch(index, dist.get_rank()))
            loss.backward() if bare else engine.backward(loss)
            engine.step()
        return masters(engine)


@of_every_stage
def test_a_bare_backward_is_the_engines(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    bare, by_engine = (rank_pool(2).run(in_turns, place, str(nvme_path), way)[0] for way in (True, False))
    assert differences(bare, by_engine) == []
