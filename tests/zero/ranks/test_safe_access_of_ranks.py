"""`safe_get_*` and `safe_set_*` with two ranks: whole values are the same everywhere, parts make up the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from ranks_model import batch, motley
from ranks_runs import Place, Run, engine_config, opened, quiet
from reference import round_half_away

Pool = Callable[[int], RankPool]
Values = dict[str, torch.Tensor]
PLACES = (
    Place(0), Place(1, "none", "nvme"), Place(2, "none", "cpu"), Place(3), Place(3, "cpu", "cpu", shared=False),
    Place(3, "nvme", "nvme"), Place(3, "cpu", "cpu", more=(("stage3_param_persistence_threshold", 500),)),
)  # fmt: skip
everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)


def backward(engine: Any, index: int) -> None:
    engine.backward(engine(batch(index, dist.get_rank(), agreed=True)))


def trained(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def made_up_of(parts: list[torch.Tensor], stage: int) -> torch.Tensor:
    """The whole of what each rank has a part of; at stage 0 each has all."""
    return parts[0] if stage == 0 else torch.cat(parts)


# ---- whole values -----------------------------------------------------------------------------


def reading(place: Place, nvme_path: str) -> tuple[Values, Values, Values]:
    """(whole masters and first moments, this rank's parts of them, whole gradients of the next backward)."""
    from zero import utils

    with opened(place, nvme_path, bf16=True) as engine:
        backward(engine, 0)
        engine.step()
        whole, own, gradients = {}, {}, {}
        for name, parameter in trained(engine):
            whole[name] = utils.safe_get_full_fp32_param(parameter)
            whole[f"{name}/exp_avg"] = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
            assert torch.equal(whole[name], engine.full_master(name))
            own[name] = utils.safe_get_local_fp32_param(parameter)
            own[f"{name}/exp_avg"] = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
        backward(engine, 1)
        for name, parameter in trained(engine):
            found = utils.safe_get_full_grad(parameter)
            if found is not None:
                gradients[name] = found
        return whole, own, gradients


@everywhere
def test_all_ranks_get_the_same_and_their_parts_make_it_up(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    told = rank_pool(2).run(reading, place, str(nvme_path))
    (whole, _, gradients), others = told[0], told[1:]
    assert gradients
    for other, _, theirs in others:
        assert whole.keys() == other.keys() and all(torch.equal(whole[name], other[name]) for name in whole)
        assert gradients.keys() == theirs.keys() and all(torch.equal(gradients[n], theirs[n]) for n in gradients)
    for name, value in whole.items():
        assert torch.equal(made_up_of([own[name] for _, own, _ in told], place.stage), value.flatten())


# ---- gradients ----------------------------------------------------------------------------------


def gradients_of(place: Place, nvme_path: str, boundary_comes: bool, op: str) -> tuple[Values, Values]:
    """Gradients after one backward (whether or not the step comes next), and what plain torch has on this rank."""
    import zero
    from zero import utils

    quiet()
    config = {**engine_config(Run(), place, nvme_path), "gradient_allreduce_op": op}
    with zero.initialize(model=motley(), config=config)[0] as engine:
        engine.set_gradient_accumulation_boundary(boundary_comes)
        backward(engine, 0)
        ours = {name: utils.safe_get_full_grad(parameter) for name, parameter in trained(engine)}
    plain = motley()
    plain(batch(0, dist.get_rank(), agreed=True)).backward()
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return {name: value for name, value in ours.items() if value is not None}, theirs


@everywhere
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("boundary_comes", [True, False], ids=["reduced", "not reduced yet"])
def test_the_gradient_is_the_mean_or_sum_over_ranks(
    rank_pool: Pool, nvme_path: Any, place: Place, boundary_comes: bool, op: str
) -> None:
    told = rank_pool(2).run(gradients_of, place, str(nvme_path), boundary_comes, op)
    ours, theirs = told[0][0], [plain for _, plain in told]
    assert ours.keys() == theirs[0].keys() | theirs[1].keys()
    for name, value in ours.items():
        total = sum(plain.get(name, torch.zeros_like(value)) for plain in theirs)
        torch.testing.assert_close(value, total / 2 if op == "mean" else total, rtol=1e-5, atol=1e-7)


# ---- changing -----------------------------------------------------------------------------------


def changing(place: Place, nvme_path: str, local: bool) -> dict[str, bool]:
    """Set everything, step with gradients that were set; which names did not come out right."""
    from zero import utils

    wrong = {}
    with opened(place, nvme_path, bf16=True) as engine:
        backward(engine, 0)
        engine.step()
        wanted: Values = {}
        for seed, (name, parameter) in enumerate(trained(engine)):
            value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            if local:
                part, state = utils.safe_get_local_fp32_param(parameter), (parameter, "exp_avg")
                utils.safe_set_local_fp32_param(parameter, part * 0.5)
                utils.safe_set_local_optimizer_state(parameter, part * 3, "exp_avg")
                assert torch.equal(utils.safe_get_local_optimizer_state(*state), part * 3)
                assert torch.equal(utils.safe_get_local_fp32_param(parameter), part * 0.5)
                value = utils.safe_get_full_fp32_param(parameter)
            else:
                utils.safe_set_full_fp32_param(parameter, value)
                utils.safe_set_full_optimizer_state(parameter, value, "exp_avg")
                wrong[f"{name}/exp_avg"] = not torch.equal(
                    utils.safe_get_full_optimizer_state(*(parameter, "exp_avg")), value
                )
            wanted[name] = value
            wrong[name] = not torch.equal(utils.safe_get_full_fp32_param(parameter), value)
        for name, weight in engine.named_full_parameters():
            if name in wanted:
                wrong[f"{name}/weight"] = bool((weight.float() - wanted[name]).abs().max() > 4 * 2**-8)
        backward(engine, 1)
        for _, parameter in trained(engine):
            utils.safe_set_full_grad(parameter, torch.ones(parameter.shape))
            assert torch.equal(utils.safe_get_full_grad(parameter), torch.ones(parameter.shape))
        numel = sum(p.numel() for _, p in trained(engine))
        engine.step()
        wrong["norm"] = abs(engine.get_global_grad_norm() - numel**0.5) > 1e-9 * numel**0.5
    return {name: bad for name, bad in wrong.items() if bad}


@everywhere
@pytest.mark.parametrize("local", [False, True], ids=["whole", "parts"])
def test_what_is_set_is_got_again_on_all_ranks(rank_pool: Pool, nvme_path: Any, place: Place, local: bool) -> None:
    assert rank_pool(2).run(changing, place, str(nvme_path), local) == [{}, {}]


def set_amid_a_step(place: Place, nvme_path: str) -> list[str]:
    """Names of gradients that are not what they were set to, after the first of two backwards of a step."""
    from zero import utils

    with opened(place, nvme_path, bf16=True, accumulation=2) as engine:
        backward(engine, 0)
        engine.step()
        for _, parameter in trained(engine):
            utils.safe_set_full_grad(parameter, torch.ones(parameter.shape))
        return [
            name for name, p in trained(engine) if not torch.equal(utils.safe_get_full_grad(p), torch.ones(p.shape))
        ]


@everywhere
def test_a_gradient_that_is_set_amid_a_step_replaces_what_every_rank_has_collected(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    assert rank_pool(2).run(set_amid_a_step, place, str(nvme_path)) == [[], []]


# ---- the attribute that DeepSpeed's clients take a rank's part from -----------------------------


def shards(place: Place, nvme_path: str) -> list[bool]:
    """Whether `ds_tensor` is this rank's part of each parameter, and whether that is all of it."""
    import zero
    from zero import utils

    with opened(place, nvme_path, bf16=True) as engine:
        found = []
        for _, parameter in trained(engine):
            own = utils.safe_get_local_fp32_param(parameter)
            assert own is not None and parameter.ds_tensor.shape == own.shape
            assert parameter.partition_numel() == -(-parameter.numel() // 2)
            with zero.GatheredParameters([parameter]):
                assert torch.equal(parameter.ds_tensor, round_half_away(own))
            utils.safe_set_local_optimizer_state(parameter, torch.ones(parameter.ds_tensor.shape), "exp_avg")
            assert torch.equal(utils.safe_get_local_optimizer_state(parameter, "exp_avg"), torch.ones_like(own))
            found.append(own.numel() == parameter.numel())
        return found


@pytest.mark.parametrize("place", PLACES[3:6], ids=lambda place: place.name)
def test_ds_tensor_is_this_ranks_part(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    told = rank_pool(2).run(shards, place, str(nvme_path))
    assert not all(whole for found in told for whole in found)
