"""`offload_optimizer.state_dtype`: fewer bytes, the same bits wherever they live, and the same loss."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, VOCAB, build, make_config, seeded, tokens, trainability
from pairwise import in_pairs
from probe import layout_of
from reference import differences, snapshot
from torch import Tensor, nn

from offload.errors import ConfigError
from offload.kernels import kernels
from offload.kernels.kernels import Moments, Segment
from zero.config import load_config
from zero.plan.sub_group_state import StateFormat

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
STEPS = 6


def opened(
    open_engine: Open, nvme_path: Path, state_dtype: str, pair: tuple[str, str] = NVME, model: str = "gpt", **more: Any
) -> Any:
    keys = {**more.pop("zero", {}), "offload_optimizer": {"state_dtype": state_dtype}}
    return open_engine(build(model), make_config(pair, nvme_path, zero=keys, **more))


def trained(engine: Any, steps: int = STEPS) -> Any:
    for index in range(steps):
        named = {"branch": index} if hasattr(engine.module, "branch") else {}
        engine.backward(engine(tokens(index), **named))
        engine.step()
    return engine


@cache
def expected(state_dtype: str, model: str, clipping: float) -> dict[str, Tensor]:
    """What training on the device gives."""
    import zero

    keys = {"offload_optimizer": {"state_dtype": state_dtype}}
    config = make_config(("none", "none"), "", zero=keys, clipping=clipping)
    with zero.initialize(model=build(model), config=config)[0] as engine:
        return snapshot(trained(engine), trainability(build(model)))


@in_pairs(
    state_dtype=("bf16", "8bit"),
    model=("gpt", "mixed", "branching"),
    pair=(("none", "cpu"), ("cpu", "none"), ("cpu", "nvme"), ("nvme", "cpu"), NVME),
    sub_group_numel=(4096, 10**9),
    clipping=(0.0, 0.3),
)
def test_where_narrow_moments_live_and_how_they_are_cut_changes_no_bit(
    open_engine: Open,
    nvme_path: Path,
    state_dtype: str,
    model: str,
    pair: tuple[str, str],
    sub_group_numel: int,
    clipping: float,
) -> None:
    more = {"zero": {"sub_group_size": sub_group_numel}, "clipping": clipping}
    engine = opened(open_engine, nvme_path, state_dtype, pair, model, **more)
    ours = snapshot(trained(engine), trainability(build(model)))
    assert differences(ours, expected(state_dtype, model, clipping)) == []


def test_deepspeeds_key_for_states_in_bf16_says_the_same(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(NVME, nvme_path)
    config["bf16"] = {"enabled": True, "bf16_optimizer_states": True}
    ours = snapshot(trained(open_engine(build("gpt"), config)), trainability(build("gpt")))
    assert differences(ours, expected("bf16", "gpt", 0.0)) == []


def test_it_holds_while_bf16_does_and_contradicts_no_other_key() -> None:
    def held(bf16: bool, **block: Any) -> str:
        keys = {"bf16": {"enabled": bf16, "bf16_optimizer_states": True}}
        config = load_config({**keys, "zero_optimization": {"stage": 1, "offload_optimizer": block}})
        assert load_config(config.as_dict()).as_dict() == config.as_dict()
        return config.zero_optimization.offload_optimizer.state_dtype

    assert held(True) == held(True, device="cpu") == held(True, state_dtype="bf16") == "bf16"
    assert held(False) == "fp32"
    with pytest.raises(ConfigError, match=r'bf16_optimizer_states: expected false together with .*state_dtype "8bit"'):
        held(True, state_dtype="8bit")


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_narrow_moments_differ_from_fp32_ones_and_are_read_as_fp32(
    open_engine: Open, nvme_path: Path, state_dtype: str
) -> None:
    engine = trained(opened(open_engine, nvme_path, state_dtype))
    exact = expected("fp32", "gpt", 0.0)
    ours = snapshot(engine, trainability(build("gpt")))
    for key in (key for key in exact if key.endswith(("/exp_avg", "/exp_avg_sq"))):
        assert ours[key].dtype == torch.float32
        assert not torch.equal(ours[key], exact[key])
        assert torch.nn.functional.cosine_similarity(ours[key].flatten(), exact[key].flatten(), dim=0) > 0.9


@cache
def bytes_of_a_step(state_dtype: str, folder: Path) -> tuple[float, int, int]:
    """(moved per step, those of the records by the plan, elements) with room for little more than a unit."""
    import zero

    keys = {
        **{"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "sub_group_size": 65_536},
        **{"stage3_max_live_parameters": 600_000, "stage3_prefetch_bucket_size": 0},
        "offload_optimizer": {"state_dtype": state_dtype},
    }
    with zero.initialize(model=build("middle"), config=make_config(NVME, folder, zero=keys))[0] as engine:

        def moved_before_the_step_after(steps: int) -> int:
            """Then nothing is due: forward has asked for every update of the step before."""
            trained(engine, steps)
            engine.backward(engine(tokens(steps)))
            engine.synchronize()
            done = engine.statistics()
            engine.step()
            return int(done.nvme_read_bytes + done.nvme_write_bytes)

        before = moved_before_the_step_after(3)
        moved = (moved_before_the_step_after(3) - before) / 4
        plan, layout = engine.plan, layout_of(engine)
        records = [plan.state_format(layout.spaces[g.space]).nbytes(g.end - g.begin) for g in plan.sub_groups]
        return moved, 2 * sum(records), sum(unit.numel for unit in engine.units)


@pytest.mark.parametrize(("state_dtype", "per_numel"), [("fp32", 26), ("bf16", 18), ("8bit", 14 + 2 * 2 * 4 / 256)])
def test_bytes_per_parameter_and_step_follow_the_formula(nvme_path: Path, state_dtype: str, per_numel: float) -> None:
    """Records in and out; weights in with them, in once more for backward, and out: 6 bytes."""
    folder = nvme_path.parent
    moved, records, numel = bytes_of_a_step(state_dtype, folder)
    padding = records - numel * (per_numel - 6)
    assert 0 <= padding < 0.02 * records
    # What ends forward begins backward, and is read once for both if the live limit lets it stay.
    assert 5 * numel <= moved - records <= 6 * numel
    exact, exact_records, _ = bytes_of_a_step("fp32", folder)
    assert exact - moved == exact_records - records


def test_a_record_is_whole_pages_of_what_it_holds() -> None:
    for remainder, numel in itertools.product((None, torch.int16, torch.float32), (4096, 3 * 4096, 1000 * 4096)):
        exact = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 2 * 4 / 256}
        for name, dtype in DTYPES.items():
            nbytes = StateFormat(remainder, dtype).nbytes(numel)
            least = numel * (exact[name] + (remainder.itemsize if remainder else 0))
            assert nbytes % 4096 == 0 and least <= nbytes < least + 4096
            data = torch.zeros(nbytes, dtype=torch.uint8)
            runs = StateFormat(remainder, dtype).byte_ranges(numel, 0, numel)
            parts = [data[first : first + length] for first, length in runs]
            record = StateFormat(remainder, dtype).from_parts(parts, 8192, step=3)
            moments = record.states.moments
            assert (record.remainder is None) == (remainder is None)
            assert moments is not None and moments.origin == 8192
            assert [x.numel() for x in (moments.exp_avg, moments.exp_avg_sq)] == [numel, numel]


def test_an_unknown_state_dtype_is_refused(open_engine: Open, nvme_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_dtype.*fp32.*bf16.*8bit"):
        opened(open_engine, nvme_path, "int8")


# ---- loss ---------------------------------------------------------------------------------------------------------


def text(index: int, batch: int = 8, length: int = 8) -> Tensor:
    """Micro-batch of a text in which a token follows from the one before, but for one in ten."""
    generator = torch.Generator().manual_seed(index)
    rows = [torch.randint(VOCAB, (batch,), generator=generator)]
    for _ in range(length - 1):
        strays = torch.rand(batch, generator=generator) < 0.1
        anything = torch.randint(VOCAB, (batch,), generator=generator)
        rows.append(torch.where(strays, anything, (rows[-1] * 5 + 3) % VOCAB))
    return torch.stack(rows, 1)


def flat_model(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A small GPT whose parameters and gradients are views of two flat tensors."""
    with seeded(seed):
        model = GPT()
    numel = -(-sum(p.numel() for p in model.parameters()) // 256) * 256
    weight, grad, position = torch.zeros(numel), torch.zeros(numel), 0
    for parameter in model.parameters():
        weight[position : position + parameter.numel()] = parameter.data.flatten()
        parameter.data = weight[position : position + parameter.numel()].view(parameter.shape)
        parameter.grad = grad[position : position + parameter.numel()].view(parameter.shape)
        position += parameter.numel()
    return model, weight, grad


@cache
def held_out_loss(state_dtype: str, seed: int, steps: int = 300) -> float:
    """After training on the seed's own text from the seed's own weights."""
    model, weight, grad = flat_model(seed)
    dtype = DTYPES[state_dtype]
    record = torch.zeros(Moments.nbytes(dtype, len(weight)), dtype=torch.uint8)
    beta1, beta2, rate = 0.9, 0.999, 3e-3
    for step in range(1, steps + 1):
        grad.zero_()
        model(text(1_000_000 * seed + step)).backward()
        segment = Segment(
            *(0, len(weight)),
            step_size=rate * min(1.0, 2 * (1 - step / (steps + 1))) / (1 - beta1**step),
            bias2_sqrt=(1 - beta2**step) ** 0.5,
            beta1=beta1,
            beta2=beta2,
        )
        moments = Moments.from_buffer(record, dtype, len(weight), 0, step)
        kernels.adamw(weight, None, moments, grad, [segment])
    with torch.no_grad():
        return statistics.fmean(float(model(text(-1 - index, batch=64))) for index in range(8))


@pytest.mark.broad
@pytest.mark.parametrize("state_dtype", [pytest.param("bf16", marks=pytest.mark.slow), "8bit"])
def test_narrow_moments_reach_the_loss_of_fp32_ones(state_dtype: str) -> None:
    """The mean difference over seeds is less than three standard errors of what the seeds themselves differ by."""
    seeds = range(6)
    exact = [held_out_loss("fp32", seed) for seed in seeds]
    ours = [held_out_loss(state_dtype, seed) for seed in seeds]
    start = statistics.fmean(held_out_loss("fp32", seed, steps=0) for seed in seeds)
    bound = 3 * statistics.stdev(exact) / len(exact) ** 0.5
    assert bound < (start - statistics.fmean(exact)) / 10, "the model was meant to learn"
    assert abs(statistics.fmean(ours) - statistics.fmean(exact)) <= bound
