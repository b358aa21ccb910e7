"""A pipeline is the model on one rank, cut: the same bits from stages, schedules, tiers and checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from ranks_runs import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from offload.errors import RankDivergenceError, RankLostError, ZeroInfinityError

Pool = Callable[[int], RankPool]
WIDTH, SAMPLES, MICRO, STEPS = 24, 4, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value + F.dropout(self.outer(torch.relu(self.inner(value))), 0.1, self.training)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(output, labels)


def head(module: nn.Module, value: Tensor) -> Tensor:
    return F.linear(value, module.weight.t())  # type: ignore[operator, union-attr]


def pipeline(num_stages: int, *, tied: bool = False, **options: Any) -> Any:
    from zero.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers: list[Any] = [LayerSpec(Block) for _ in range(4)]
    layers.insert(2, torch.tanh)
    if tied:
        make = ("ends", nn.Linear, WIDTH, WIDTH)
        layers = [TiedLayerSpec(*make), *layers, TiedLayerSpec(*make, forward_fn=head)]
    return PipelineModule(layers, num_stages, loss_fn=loss_of, seed_layers=True, **options)


def config_of(tier: str, nvme: str, *, stage: int = 1, **more: Any) -> dict[str, Any]:
    offload = {"device": tier, **({"nvme_path": nvme} if tier == "nvme" else {})}
    zero = {"stage": stage, **({"offload_optimizer": offload} if stage else {})}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **more,
    }


def data(step: int, part: int, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + part)
    for _ in range(MICRO):
        yield tuple(torch.randn(samples, WIDTH, generator=generator) for _ in range(2))  # type: ignore[misc]


def values_of(engine: Any) -> dict[str, Tensor]:
    from zero.utils import safe_get_full_fp32_param

    engine.synchronize()
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(p).clone() for name, p in named}


def run(num_stages: int, config: dict[str, Any], options: dict[str, Any], save: str = "", load: str = "") -> Any:
    """Losses and norms of the steps, the losses of evaluations, and this stage's values."""
    import zero

    quiet()
    engine = zero.initialize(model=pipeline(num_stages, **options), config=config)[0]
    part = engine.module.data_place[0]
    with engine:
        if load:
            assert engine.load_checkpoint(load)[0] is not None
        told = []
        for step in range(engine.global_steps, engine.global_steps + STEPS):
            loss = engine.train_batch(data(step, part))
            told.append((loss.item(), engine.get_global_grad_norm()))
        if save:
            engine.save_checkpoint(save)
        for samples in (SAMPLES, SAMPLES - part, SAMPLES - 1):  # all parts of the data, one of them, all change
            told.append(engine.eval_batch(data(99, part, samples)).item())
        return told, values_of(engine)


def merged(answers: list[Any]) -> dict[str, Tensor]:
    return {name: value for _, values in answers for name, value in values.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tier, schedule", [("cpu", "1f1b"), ("nvme", "gpipe")])
def test_two_stages_have_the_bits_of_one(rank_pool: Pool, nvme_path: Path, tier: str, schedule: str) -> None:
    config = config_of(tier, str(nvme_path), pipeline={"schedule": schedule})
    (alone,) = rank_pool(1).run(run, 1, config, {})
    answers = rank_pool(2).run(run, 2, config, {})
    assert answers[0][0] == answers[1][0] == alone[0]
    assert same(merged(answers), alone[1])
    assert not answers[0][1].keys() & answers[1][1].keys()


def changed(num_stages: int, config: dict[str, Any], folder: str, resumed: bool) -> Any:
    """A step of three micro-batches after one of four, by the engine of that step or by one that loads it."""
    import zero

    quiet()
    with zero.initialize(model=pipeline(num_stages), config=config)[0] as engine:
        if resumed:
            engine.load_checkpoint(folder)
        else:
            engine.train_batch(data(0, 0))
            engine.save_checkpoint(folder)
            engine.set_train_batch_size(SAMPLES * 3)
        loss = engine.train_batch(data(1, 0))
        return (engine.global_steps, loss.item()), values_of(engine)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_batch_of_another_number_of_micro_batches_is_one_step(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, num_stages: int
) -> None:
    pool, config = rank_pool(num_stages), config_of("cpu", str(nvme_path))
    answers = pool.run(changed, num_stages, config, str(tmp_path), False, timeout_seconds=60.0)
    fewer = {**config, "gradient_accumulation_steps": 3}
    resumed = pool.run(changed, num_stages, fewer, str(tmp_path), True, timeout_seconds=60.0)
    assert answers[0][0][0] == 2
    assert [told for told, _ in answers] == [told for told, _ in resumed]
    assert same(merged(answers), merged(resumed))


def test_tied_weights_are_updated_by_the_sum_of_both_stages(rank_pool: Pool, nvme_path: Path) -> None:
    """The two uses are added up after the micro-batches instead of in each: some bits of sums in fp32 differ."""
    config = config_of("cpu", str(nvme_path))
    (alone,) = rank_pool(1).run(run, 1, config, {"tied": True})
    answers = rank_pool(2).run(run, 2, config, {"tied": True})
    name = "tied_modules.ends.weight"
    assert torch.equal(answers[0][1][name], answers[1][1][name])
    assert answers[0][0] == answers[1][0]
    torch.testing.assert_close(torch.tensor(answers[0][0][-1]), torch.tensor(alone[0][-1]), rtol=1e-5, atol=0.0)
    for (loss, norm), (wanted, whole) in zip(answers[0][0][:STEPS], alone[0][:STEPS], strict=True):
        torch.testing.assert_close(torch.tensor([loss, norm]), torch.tensor([wanted, whole]), rtol=1e-5, atol=0.0)
    for key, value in merged(answers).items():
        torch.testing.assert_close(value, alone[1][key], rtol=0.0, atol=1e-4)  # a hundredth of what AdamW moves it by


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_another_number_of_stages(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, before: int, after: int
) -> None:
    config, options, folder = config_of("nvme", str(nvme_path)), {"tied": True}, str(tmp_path)
    rank_pool(before).run(run, before, config, options, folder)
    through = rank_pool(before).run(run, before, config, options, "", folder)
    loaded = rank_pool(after).run(run, after, config, options, "", folder)
    for key, value in merged(loaded).items():
        torch.testing.assert_close(value, merged(through)[key], rtol=0.0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(loaded[0][0][0]), torch.tensor(through[0][0][0]), rtol=1e-5, atol=0.0)


def at_stage_3(nvme_path: str, folder: str) -> dict[str, Tensor]:
    """The values of the same layers in a Sequential, on a slice of which each rank works."""
    import zero

    quiet()
    layers = [Block(), Block(), nn.Tanh(), Block(), Block()]
    home = {"device": "nvme", "nvme_path": nvme_path}
    config = config_of("nvme", nvme_path, stage=3)
    config["zero_optimization"]["offload_param"] = home
    with zero.initialize(model=nn.Sequential(*layers), config=config)[0] as engine:
        assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == STEPS
        return values_of(engine)


def test_a_checkpoint_of_a_pipeline_loads_at_stage_3_without_one(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path
) -> None:
    saved = rank_pool(2).run(run, 2, config_of("cpu", str(nvme_path)), {}, str(tmp_path))
    assert same(rank_pool(2).run(at_stage_3, str(nvme_path), str(tmp_path))[0], merged(saved))


def freeze(num_stages: int, config: dict[str, Any], which: list[int]) -> Any:
    """Losses and values where some layers are not trained."""
    import zero
    from zero.pipe import PipelineModule

    quiet()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for index in which:
        layers[index].requires_grad_(False)
    model = PipelineModule(layers, num_stages, loss_fn=loss_of, partition_method="uniform")
    with zero.initialize(model=model, config=config)[0] as engine:
        return [engine.train_batch(data(step, 0)).item() for step in range(STEPS)], values_of(engine)


@pytest.mark.parametrize("which", [[0, 1], [2, 3]])
def test_a_stage_of_which_nothing_is_trained_passes_gradients_on(
    rank_pool: Pool, nvme_path: Path, which: list[int]
) -> None:
    config = config_of("cpu", str(nvme_path))
    (alone,) = rank_pool(1).run(freeze, 1, config, which)
    answers = rank_pool(2).run(freeze, 2, config, which)
    assert answers[0][0] == answers[1][0] == alone[0]
    assert same(merged(answers), alone[1])


def in_place(num_stages: int, config: dict[str, Any]) -> Any:
    """Losses and values where each stage but the first begins with a layer that changes its input."""
    import zero
    from zero.pipe import PipelineModule

    quiet()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, num_stages, loss_fn=loss_of, partition_method="uniform")
    with zero.initialize(model=model, config=config)[0] as engine:
        losses = [engine.train_batch(data(step, 0)).item() for step in range(STEPS)]
        return [*losses, engine.eval_batch(data(99, 0)).item()], values_of(engine)


def test_a_layer_that_works_in_place_may_begin_a_stage(rank_pool: Pool, nvme_path: Path) -> None:
    config = config_of("cpu", str(nvme_path))
    (alone,) = rank_pool(1).run(in_place, 1, config)
    answers = rank_pool(2).run(in_place, 2, config)
    assert answers[0][0] == answers[1][0] == alone[0]
    assert same(merged(answers), alone[1])


def overflow(num_stages: int, config: dict[str, Any]) -> Any:
    """(scale, norm, skipped) after steps of which the second overflows on one stage's inputs; then the values."""
    import zero

    quiet()
    with zero.initialize(model=pipeline(num_stages), config=config)[0] as engine:
        told = []
        for step in range(4):
            batches = [(inputs * (float("inf") if step == 1 else 1.0), labels) for inputs, labels in data(step, 0)]
            engine.train_batch(iter(batches))
            told.append((engine.optimizer.cur_scale, engine.get_global_grad_norm(), engine.skipped_steps))
        return told, values_of(engine)


def test_an_overflow_skips_the_step_on_all_stages(rank_pool: Pool, nvme_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "auto_cast": True}
    config = config_of("cpu", str(nvme_path), fp16=fp16)
    (alone,) = rank_pool(1).run(overflow, 1, config)
    answers = rank_pool(2).run(overflow, 2, config)
    assert answers[0][0] == answers[1][0] == alone[0] and alone[0][-1][2] == 1
    assert same(merged(answers), alone[1])


def fail_once(nvme_path: str, failing_rank: int) -> list[str]:
    """What is told where one rank of the last stage fails amid a batch, by that call and by the next one."""
    import zero
    from zero.pipe import PipelineModule

    quiet()

    def failing(output: Tensor, labels: Tensor) -> Tensor:
        if labels.flatten()[0] == 7 and dist.get_rank() == failing_rank:
            raise ValueError("no such label")
        return loss_of(output, labels)

    model = PipelineModule([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], 2, loss_fn=failing)
    engine, told = zero.initialize(model=model, config=config_of("cpu", nvme_path))[0], []
    batches = [(inputs, torch.full_like(labels, 7.0 * (i == 2))) for i, (inputs, labels) in enumerate(data(0, 0))]
    for _ in range(2):
        with pytest.raises((ValueError, RankDivergenceError)) as caught:
            engine.train_batch(iter(batches))
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    with suppress(RankDivergenceError):  # what the ranks would have ended together
        engine.close()
    return told


def test_what_fails_on_one_stage_is_told_on_all_now_and_later(rank_pool: Pool, nvme_path: Path) -> None:
    told_on_all(rank_pool(2).run(fail_once, str(nvme_path), 1))


@pytest.mark.slow
@pytest.mark.parametrize("failing_rank", [2, 3])
def test_what_fails_on_one_of_two_ranks_of_a_stage_is_told_on_all(
    rank_pool: Pool, nvme_path: Path, failing_rank: int
) -> None:
    told_on_all(rank_pool(4).run(fail_once, str(nvme_path), failing_rank))


def told_on_all(answers: list[list[str]]) -> None:
    own = [told[0] for told in answers if told[0] == "ValueError: no such label"]
    assert len(own) == 1
    for text in (text for told in answers for text in told if text != own[0]):
        assert "rank " in text and "no such label" in text


def die(nvme_path: str) -> str:
    import zero
    from zero.pipe import PipelineModule

    quiet()

    def ending(output: Tensor, labels: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return output

    model = PipelineModule([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], 2, loss_fn=ending)
    engine = zero.initialize(model=model, config=config_of("cpu", nvme_path))[0]
    with pytest.raises(RankLostError) as caught:
        engine.train_batch(data(0, 0))
    return str(caught.value)


@pytest.mark.slow
def test_a_stage_whose_process_dies_is_named(rank_pool: Pool, nvme_path: Path) -> None:
    text = rank_pool(2).run(die, str(nvme_path), errors="return")[0]
    assert "rank 1" in text and "has died" in text


def refusals(nvme_path: str) -> list[str]:
    import zero
    from zero.pipe import LayerSpec, PipelineModule

    quiet()
    told = []

    def tell(call: Callable[[], Any]) -> None:
        try:
            call()
            told.append("no error")
        except ZeroInfinityError as error:
            told.append(str(error))

    for stage in (2, 3):
        tell(lambda: zero.initialize(model=pipeline(2), config=config_of("cpu", nvme_path, stage=stage)))  # noqa: B023
    tell(lambda: PipelineModule([LayerSpec(Block)] * 4, 3))
    tell(lambda: PipelineModule([LayerSpec(Block)], 2))
    tell(lambda: PipelineModule([LayerSpec(Block)] * 4, 2, partition_method="type:Conv"))
    with zero.initialize(model=pipeline(2), config=config_of("cpu", nvme_path))[0] as engine:
        for call in (engine.forward, engine, engine.backward, engine.step):
            tell(call)
        tell(lambda: engine.train_batch(iter(list(data(0, 0))[:2])))
        tell(lambda: engine.train_batch(iter([*list(data(0, 0))[:3], *list(data(0, 0, 3))[:1]])))
        engine.train_batch(data(0, 0))
    return told


def test_what_a_pipeline_has_not_is_refused_by_name_and_data_that_ends_changes_nothing(
    rank_pool: Pool, nvme_path: Path
) -> None:
    for told in rank_pool(2).run(refusals, str(nvme_path)):
        words = ["stage: 2", "stage: 3", "divisor", "number of layers", "no layer has a class", "forward", "forward"]
        for text, word in zip(told, [*words, "backward", "step", "2 of 4", "one shape"], strict=True):
            assert word in text


@pytest.mark.slow
@pytest.mark.parametrize("tier, schedule", [("cpu", "1f1b"), ("nvme", "1f1b"), ("nvme", "gpipe")])
def test_four_stages_have_the_bits_of_one(rank_pool: Pool, nvme_path: Path, tier: str, schedule: str) -> None:
    config = config_of(tier, str(nvme_path), pipeline={"schedule": schedule})
    (alone,) = rank_pool(1).run(run, 1, config, {})
    answers = rank_pool(4).run(run, 4, config, {})
    assert all(answer[0] == alone[0] for answer in answers)
    assert same(merged(answers), alone[1])


@pytest.mark.slow
@pytest.mark.parametrize("tier, stage", [("cpu", 0), ("cpu", 1), ("nvme", 1)])
def test_two_stages_of_two_ranks_have_the_bits_of_two_ranks(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, tier: str, stage: int
) -> None:
    config, folder = config_of(tier, str(nvme_path), stage=stage), str(tmp_path)
    wide = rank_pool(2).run(run, 1, config, {})
    answers = rank_pool(4).run(run, 2, config, {}, folder)
    assert all(answer[0] == wide[0][0] for answer in answers)
    assert same(merged(answers), wide[0][1])
    assert same(answers[0][1], answers[1][1]) and same(answers[2][1], answers[3][1])
    gone_on = rank_pool(4).run(run, 2, config, {}, "", folder)
    other = rank_pool(2).run(run, 1, config, {}, "", folder)
    assert same(merged(gone_on), other[0][1])


@pytest.mark.slow
def test_checkpoints_inside_a_stage_change_no_bit(rank_pool: Pool, nvme_path: Path) -> None:
    config = config_of("cpu", str(nvme_path))
    plain = rank_pool(2).run(run, 2, config, {})
    computed_again = rank_pool(2).run(run, 2, config, {"activation_checkpoint_interval": 1})
    assert [answer[0] for answer in plain] == [answer[0] for answer in computed_again]
    assert same(merged(plain), merged(computed_again))


def reported(folder: str, nvme_path: str) -> tuple[float, int]:
    """The loss of a batch, and how many micro-batches of its iterator are left after another one without."""
    import zero

    quiet()
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    config = config_of("cpu", nvme_path, csv_monitor=monitor)
    with zero.initialize(model=pipeline(2), config=config)[0] as engine:
        given = iter([*data(1, 0), *data(2, 0), *data(3, 0)])
        loss = engine.train_batch(given).item()
        engine.train_batch()
        return loss, len(list(given))


def test_the_first_rank_reports_the_loss_and_an_iterator_is_gone_on_with(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path
) -> None:
    answers = rank_pool(2).run(reported, str(tmp_path), str(nvme_path))
    assert [left for _, left in answers] == [MICRO, MICRO]
    lines = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert float(lines[1].split(",")[1]) == pytest.approx(answers[0][0], rel=1e-6)


def limits(nvme_path: str, available_bytes: int) -> int:
    """Host memory that this stage may plan with, of what is free on the node."""
    import zero
    from zero.assembly import engine_parts

    quiet()
    read = engine_parts.machine_to_plan
    engine_parts.machine_to_plan = lambda *given: replace(read(*given), available_bytes=available_bytes)
    try:
        config = config_of("nvme", nvme_path, memory_budget={"host": "auto"})
        with zero.initialize(model=pipeline(2), config=config)[0] as engine:
            return int(engine.plan.host_limit_bytes)
    finally:
        engine_parts.machine_to_plan = read


def test_stages_share_what_is_free_on_their_node(rank_pool: Pool, nvme_path: Path) -> None:
    free_bytes = 1 << 30
    assert 0 < sum(rank_pool(2).run(limits, str(nvme_path), free_bytes)) <= free_bytes
