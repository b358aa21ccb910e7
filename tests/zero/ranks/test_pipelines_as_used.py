"""What users give a pipeline: data sets, loaders, tuples, groups, layers that change their input, and what they set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from ranks_runs import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Pool = Callable[[int], RankPool]
WIDTH, SAMPLES, MICRO = 8, 4, 3
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}


def packed(value: Tensor) -> tuple[Tensor]:
    return (value,)


def same(value: Tensor) -> Tensor:
    return value


def listed(value: Tensor) -> list[Tensor]:
    return [value, value + 1]


def first_of(value: Any) -> Tensor:
    assert isinstance(value, tuple), type(value)
    return value[0]  # type: ignore[no-any-return]


def doubled(value: Tensor) -> Tensor:
    return value.mul_(2)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def opened(num_stages: int, middle: list[Any] = (), config: dict[str, Any] = CONFIG, **given: Any) -> Any:  # type: ignore[assignment]
    import zero
    from zero.pipe import LayerSpec, PipelineModule

    quiet()
    ends = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    options = given.pop("options", {})
    before = given.pop("before", [])
    layers = [*before, ends[0], *middle, ends[1]]
    model = PipelineModule(layers, num_stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform", **options)
    return zero.initialize(model=model, config=config, **given)[0]


def items(seed: int = 0, count: int = MICRO) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield tuple(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))  # type: ignore[misc]


def losses(num_stages: int, middle: list[Any], how: dict[str, Any]) -> list[float]:
    with opened(num_stages, middle, **how) as engine:
        return [engine.train_batch(items(step)).item() for step in range(3)]


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("middle", [[packed, first_of], [listed, first_of]], ids=["tuple of one", "list"])
def test_a_layer_gets_what_the_one_before_returns_wherever_the_cut_is(
    rank_pool: Pool, middle: list[Any], interval: int
) -> None:
    """With two stages the cut is between the two; inside a stage a list stays one."""
    how = {"options": {"activation_checkpoint_interval": interval}}
    alone = rank_pool(1).run(losses, 1, middle if middle[0] is packed else [same, same], how, timeout_seconds=60.0)
    assert rank_pool(2).run(losses, 2, middle, how, timeout_seconds=60.0) == alone * 2


def in_place(num_stages: int) -> tuple[list[float], bool]:
    """A batch that is used again and again, by a first layer that changes its input."""
    given = list(items())
    kept = [(value.clone(), label.clone()) for value, label in given]
    with opened(num_stages, before=[doubled]) as engine:
        told = [engine.train_batch(iter(given)).item() for _ in range(2)]
    same = all(
        torch.equal(a, b) for one, other in zip(given, kept, strict=True) for a, b in zip(one, other, strict=True)
    )
    return told, same


def test_a_layer_that_changes_its_input_changes_neither_the_callers_batch_nor_the_result(rank_pool: Pool) -> None:
    alone = rank_pool(1).run(in_place, 1, timeout_seconds=60.0)
    assert alone[0][1] and rank_pool(2).run(in_place, 2, timeout_seconds=60.0) == alone * 2


def ordered() -> list[list[int]]:
    """The samples that a stage gets, of ranks that were seeded by themselves."""
    import torch.distributed as dist

    numbers = torch.arange(24.0)
    data = TensorDataset(numbers[:, None].expand(-1, WIDTH).contiguous(), numbers)
    torch.manual_seed(17 + dist.get_rank())
    seen: list[list[int]] = []
    with opened(2, training_data=data) as engine:

        def note(batch: Any) -> Any:
            inputs, numbers = batch
            seen.append([int(number) for number in numbers])
            assert torch.equal(inputs[:, 0], numbers)
            return inputs, inputs

        engine.set_batch_fn(note)
        for _ in range(3):
            engine.train_batch()
    return seen


def test_all_stages_read_the_samples_in_the_order_of_the_data(rank_pool: Pool) -> None:
    """As DeepSpeed's pipelines do, whose other loaders are in random order."""
    one, other = rank_pool(2).run(ordered, timeout_seconds=60.0)
    epoch = [number for batch in one[:6] for number in batch]
    assert one == other and epoch == list(range(24))


def as_seen(num_stages: int) -> dict[str, Any]:
    """Where a rank stands, by the engine and by the module of groups, and the sums over its groups."""
    import torch.distributed as dist

    import zero
    from zero.compat import groups
    from zero.compat.engine_names import add_deepspeed_names
    from zero.pipe import LayerSpec, PipelineModule

    class Telling(PipelineModule):
        """The last stage has the mean of each output beside the loss."""

        told: Tensor | None = None

        def forward(self, inputs: Any) -> Any:
            outputs = super().forward(inputs)
            if self.stage_id == self.num_stages - 1:
                self.told = outputs.mean()
            return outputs

        def get_additional_losses(self) -> dict[str, Tensor] | None:
            return None if self.told is None else {"mean": self.told, "twice": 2 * self.told}

    quiet()
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    model = Telling(layers, num_stages, loss_fn=loss_of, seed_layers=True)
    rank, sums = dist.get_rank(), []
    with zero.initialize(model=model, config=CONFIG)[0] as engine:
        add_deepspeed_names(engine)
        grid = engine.grid
        for group in (engine.data_parallel_group, grid.get_pipe_parallel_group(), groups._get_data_parallel_group()):
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=group)
            sums.append(value.item())
        engine.train_batch(items(seed=grid.data_parallel_id))
        more = engine.get_additional_losses()
        ranks = [groups.get_data_parallel_world_size(), groups._get_data_parallel_group_ranks()]
        groups.use_mpu(None)  # the process of a pool runs other tests too
        return {
            "place": [grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank(), engine.world_size],
            "sums": sums,
            "ranks": ranks,
            "next": grid.p2p_groups[rank],
            "peer": grid.stage_to_global(num_stages - 1),
            "kinds": [engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel],
            "more": {name: value.item() for name, value in more.items()},
        }


def test_a_rank_knows_its_place_and_its_groups_and_all_know_the_further_losses(rank_pool: Pool) -> None:
    seen = rank_pool(4).run(as_seen, 2, timeout_seconds=60.0)
    assert [one["place"] for one in seen] == [[0, 0, 4], [0, 1, 4], [1, 0, 4], [1, 1, 4]]
    assert [one["sums"] for one in seen] == [[1, 2, 1], [1, 4, 1], [5, 2, 5], [5, 4, 5]]
    assert [one["ranks"] for one in seen] == [[2, [0, 1]], [2, [0, 1]], [2, [2, 3]], [2, [2, 3]]]
    assert [one["next"] for one in seen] == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert [one["peer"] for one in seen] == [2, 3, 2, 3]
    assert all(one["kinds"] == [True, True, False] for one in seen)
    more = seen[0]["more"]
    assert all(one["more"] == more for one in seen)
    assert more["twice"] == 2 * more["mean"] != 0


def run_twice(interval: int) -> int:
    """How many runs of a layer a batch has."""
    runs: list[None] = []

    class Counting(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            runs.append(None)
            return super().forward(value)

    settings = {"pipeline": {"activation_checkpoint_interval": interval}}
    with opened(1, before=[Counting(WIDTH, WIDTH)], config={**CONFIG, **settings}) as engine:
        engine.train_batch(items())
    return len(runs)


def test_the_configuration_says_which_layers_backward_runs_again(rank_pool: Pool) -> None:
    for interval in (0, 1):
        assert rank_pool(1).run(run_twice, interval, timeout_seconds=60.0) == [MICRO * (1 + interval)]


def refused(num_stages: int) -> list[str]:
    from offload.errors import ConfigError

    told = []
    with opened(num_stages) as engine:
        for data in (list(items()), DataLoader(TensorDataset(torch.zeros(12, WIDTH)), batch_size=SAMPLES)):
            with pytest.raises(ConfigError, match="expected an iterator") as error:
                engine.train_batch(data)
            told.append(str(error.value))
        engine.train_batch(items())
    return told


def test_what_would_begin_anew_in_each_call_is_refused_as_an_iterator(rank_pool: Pool) -> None:
    (told,) = rank_pool(1).run(refused, 1, timeout_seconds=60.0)
    assert "got list" in told[0] and "got DataLoader" in told[1]


def constant(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def groups_after(folder: str, load: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    """Learning rates of this stage's groups, before a save and after a load; and the setting of a counter."""
    import zero
    from zero.pipe import LayerSpec, PipelineModule

    quiet()
    rates = []
    for resumed in (False, True):
        model = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)], 2, loss_fn=loss_of)
        stage = model.stage_id
        groups = [{"params": [parameter], "lr": 0.01 * (1 + stage)} for parameter in model.parameters()]
        groups = groups if stage == 0 else [{"params": list(model.parameters()), "lr": 0.02}]
        engine = zero.initialize(model=model, model_parameters=groups, config=CONFIG, lr_scheduler=constant)[0]
        with engine:
            if resumed:
                engine.lr_scheduler.base_lrs = [8.0] * len(groups)
                for group in engine.optimizer.param_groups:
                    group["lr"] = 9.0
                engine.load_checkpoint(folder, **load)
            else:
                engine.train_batch(items())
                engine.save_checkpoint(folder)
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
            assert engine.lr_scheduler.base_lrs == rates[0]
            engine.global_steps = 7
            steps = engine.run.global_steps
    return rates[0], rates[1], steps


class Counting(nn.Linear):
    """Counts its forwards in an extra state."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(value)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counted(num_stages: int, folder: str, load: bool) -> dict[str, int]:
    from zero.pipe import LayerSpec

    with opened(num_stages, [LayerSpec(Counting, WIDTH, WIDTH) for _ in range(2)]) as engine:
        if load:
            engine.load_checkpoint(folder)
        else:
            for step in range(2):
                engine.train_batch(items(step))
            engine.save_checkpoint(folder)
        return {name: layer.calls for name, layer in engine.module.named_modules() if isinstance(layer, Counting)}


def test_extra_states_of_all_stages_are_saved_and_load_with_another_number_of_stages(
    rank_pool: Pool, tmp_path: Path
) -> None:
    """The cut is between the two layers that have one."""
    calls = rank_pool(2).run(counted, 2, str(tmp_path), False, timeout_seconds=60.0)
    assert [list(each) for each in calls] == [["1"], ["2"]] and all(min(each.values()) >= 2 * MICRO for each in calls)
    assert rank_pool(2).run(counted, 2, str(tmp_path), True, timeout_seconds=60.0) == calls
    assert rank_pool(1).run(counted, 1, str(tmp_path), True, timeout_seconds=60.0) == [{**calls[0], **calls[1]}]


def test_each_stage_goes_on_with_its_own_groups_and_what_is_set_reaches_its_engine(
    rank_pool: Pool, tmp_path: Path
) -> None:
    """The stages have other numbers of groups too."""
    answers = rank_pool(2).run(groups_after, str(tmp_path), {}, timeout_seconds=60.0)
    assert [answer[0] for answer in answers] == [[0.01, 0.01], [0.02]]
    assert [answer[1] for answer in answers] == [answer[0] for answer in answers]
    assert [answer[2] for answer in answers] == [7, 7]


def test_each_stage_goes_on_with_its_own_schedule_if_it_loads_no_states(rank_pool: Pool, tmp_path: Path) -> None:
    answers = rank_pool(2).run(groups_after, str(tmp_path), {"load_optimizer_states": False}, timeout_seconds=60.0)
    assert [answer[2] for answer in answers] == [7, 7]


def test_a_pipeline_counts_its_micro_batches_itself(rank_pool: Pool) -> None:
    expected = rank_pool(2).run(losses, 2, [], {}, timeout_seconds=60.0)
    how = {"config": {**CONFIG, "managed_gradient_accumulation": False}}
    assert rank_pool(2).run(losses, 2, [], how, timeout_seconds=60.0) == expected


def torn() -> list[str]:
    """The loader of the first stage fails once, amid a batch."""
    told = []

    class Flaky:
        def __init__(self) -> None:
            self.given, self.left = items(count=12), 4

        def __iter__(self) -> Flaky:
            return self

        def __next__(self) -> Any:
            self.left -= 1
            if not self.left:
                raise OSError("a disk")
            return next(self.given)

    engine = opened(2)
    data: Any = Flaky() if engine.is_first_stage() else items(count=12)
    with engine:
        for _ in range(3):
            try:
                engine.train_batch(data)
                told.append("")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_loader_that_fails_amid_a_batch_never_leaves_inputs_beside_other_labels(rank_pool: Pool) -> None:
    for told in rank_pool(2).run(torn, timeout_seconds=60.0):
        assert told[0] == "" and told[1] and told[2]
