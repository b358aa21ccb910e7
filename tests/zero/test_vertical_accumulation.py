"""Micro-batches side by side: the same bits as one after the other, and each unit's weights come once a step.

Whatever ends a batch early leaves an engine that trains on as if that batch had not been.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, LIVE_NUMEL, Stumbling, build, make_config, next_token_loss, seeded, tokens
from on_tiers import equal, masters
from probe import open_calls
from recovery import NVME, failing, spilling
from support_models import ROWS, torch_checkpoint
from torch import nn

import zero
from offload.errors import ConfigError, StateError, StorageError

Open = Callable[..., Any]
COUNT = 4
"""Micro-batches of a step."""


def first_of(output: Any) -> torch.Tensor:
    """A loss, of what any of the models returns."""
    if isinstance(output, tuple):
        return output[0] + output[1]
    return output if isinstance(output, torch.Tensor) else output.loss


FP32: dict[str, Any] = {"bf16": False}
"""A sum of a few bf16 gradients in fp32 is often exact, and then no order shows."""


def batches(first: int = 0) -> Iterator[torch.Tensor]:
    return (tokens(index) for index in range(first, 10_000))


def config_of(nvme_path: Path, pair: tuple[str, str] = NVME, *, vertical: bool, **more: Any) -> dict[str, Any]:
    return make_config(pair, nvme_path, **{"accumulation": COUNT, "vertical_accumulation": vertical, **more})


def trained(engine: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    stream = batches()
    losses = [float(engine.train_batch(stream, lambda batch: first_of(engine(batch)))) for _ in range(steps)]
    return losses, masters(engine)


def pair_of(open_engine: Open, model: Callable[[], nn.Module], nvme_path: Path, **more: Any) -> tuple[Any, Any]:
    """(side by side, one after the other)"""
    one, other = (open_engine(model(), config_of(nvme_path, vertical=v, **more)) for v in (True, False))
    return one, other


def agree(one: Any, other: Any) -> None:
    found, expected = trained(one), trained(other)
    assert found[0] == expected[0]
    assert equal(found[1], expected[1])


MODELS = ["gpt", "tied", "lora", "mixed", "odd_sizes", "reused", "branching", "structured", "two_losses", "middle"]


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_one_after_the_other(open_engine: Open, nvme_path: Path, name: str) -> None:
    agree(*pair_of(open_engine, lambda: build(name), nvme_path, clipping=0.1, **FP32))


@pytest.mark.parametrize(
    ("name", "recompute"), [("gpt", "reentrant"), ("gpt", "nonreentrant"), ("reused", "nonreentrant")]
)
def test_bits_agree_where_forwards_are_recomputed(
    open_engine: Open, nvme_path: Path, name: str, recompute: str
) -> None:
    agree(*pair_of(open_engine, lambda: build(name, recompute=recompute), nvme_path, **FP32))


def test_a_module_that_is_recomputed_use_by_use_has_the_same_gradient_to_the_rounding_of_its_sum(
    open_engine: Open, nvme_path: Path
) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    pair = pair_of(
        open_engine,
        lambda: build("reused", recompute="reentrant"),
        nvme_path,
        optimizer=sgd,
        **FP32,
    )
    before = {name: value.clone() for name, value in masters(pair[0]).items()}
    (loss, found), (loss_expected, expected) = (trained(engine, steps=1) for engine in pair)
    assert loss == loss_expected
    for name, start in before.items():
        gradient = expected[name] - start
        # Two uses in each of four micro-batches: a sum of 8 is off by 7 halves of a last place of what it passes.
        bound = 8 * 2**-24 * 4 * float(gradient.abs().max()) + 2**-23 * float(start.abs().max())
        assert float((found[name] - expected[name]).abs().max()) <= bound
        assert float(gradient.abs().max()) > 1000 * bound  # the bound would tell a use that is missing


PLACES: dict[str, dict[str, Any]] = {
    "host memory": {"pair": ("cpu", "cpu")},
    "device": {"pair": ("none", "none")},
    "bf16": {},
    "fp16": {"bf16": False, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "16-bit sums": {"data_types": {"grad_accum_dtype": "bf16"}},
    "default limits": {
        "zero": {"stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 1_000_000_000}
    },
    "stage 2": {"pair": ("none", "cpu"), "zero": {"stage": 2}},
}


@pytest.mark.parametrize("place", PLACES)
def test_bits_agree_wherever_things_live(open_engine: Open, nvme_path: Path, place: str) -> None:
    agree(*pair_of(open_engine, lambda: build("gpt"), nvme_path, **PLACES[place]))


def test_gradients_on_nvme_are_written_once_a_step(open_engine: Open, nvme_path: Path) -> None:
    found, expected = (
        spilling(open_engine, nvme_path, accumulation=COUNT, vertical_accumulation=vertical)
        for vertical in (True, False)
    )
    agree(found, expected)
    wrote = [engine.statistics().nvme_write_bytes for engine in (found, expected)]
    gradients = sum(unit.numel * 4 for unit in found.units)
    assert wrote[1] - wrote[0] >= 3 * (COUNT - 1) * gradients


@pytest.mark.parametrize("recompute", [None, "reentrant", "nonreentrant"])
def test_weights_come_as_often_as_for_one_micro_batch(
    open_engine: Open, nvme_path: Path, recompute: str | None
) -> None:
    gathers = []
    for accumulation in (COUNT, 1):
        config = make_config(NVME, nvme_path, accumulation=accumulation, vertical_accumulation=True)
        engine = open_engine(build("gpt", recompute=recompute), config)
        trained(engine, steps=2)  # the order is learnt
        before = engine.statistics().gathers
        trained(engine, steps=4)
        engine.synchronize()
        gathers.append(engine.statistics().gathers - before)
    assert gathers[0] <= gathers[1]


def test_live_weights_stay_within_the_limit(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt", blocks=6), config_of(nvme_path, vertical=True))
    trained(engine)
    assert engine.statistics().live_numel_peak <= LIVE_NUMEL


class Ways(GPT):
    """Each micro-batch takes blocks of its own, which its first token chooses."""

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        chosen = int(x[0, 0]) % len(self.blocks)
        x = self.embedding(x) + self.position[: x.shape[1]]
        for index in range(chosen + 1):
            x = self.call(self.blocks[-1 - index], x)
        return self.norm(x)


@pytest.mark.parametrize("recompute", [None, "nonreentrant"])
def test_micro_batches_may_take_different_ways(open_engine: Open, nvme_path: Path, recompute: str | None) -> None:
    """Of two, so that their sum has the same bits in any order."""
    with seeded(3):
        source = Ways(blocks=4, recompute=recompute).state_dict()

    def model() -> nn.Module:
        made = Ways(blocks=4, recompute=recompute)
        made.load_state_dict(source)
        return made

    agree(*pair_of(open_engine, model, nvme_path, accumulation=2))


@pytest.mark.broad
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("name", ROWS)
def test_bits_agree_for_every_kind_of_model(
    open_engine: Open, nvme_path: Path, name: str, reentrant: bool | None
) -> None:
    row, outcomes = ROWS[name], []
    for package in row.needs:
        pytest.importorskip(package)
    # Where micro-batches go different ways their gradients may come in another order; a sum of two knows none. Dropout
    # draws other numbers in each order.
    count = 2 if name in ("branches", "MoE, experts in a ModuleList") else COUNT
    for vertical in (True, False):
        model = row.make(None if reentrant is None else torch_checkpoint(reentrant))
        for module in model.modules():
            module.__dict__.update({key: 0.0 for key in ("p", "dropout") if isinstance(getattr(module, key, 0), float)})
        config = make_config(NVME, nvme_path, accumulation=count, vertical_accumulation=vertical, **FP32)
        engine = open_engine(model, config)
        stream = (row.feed(index) for index in range(100))
        losses = [float(engine.train_batch(stream)) for _ in range(3)]
        buffers = {f"buffer {name}": value.clone() for name, value in engine.module.named_buffers()}
        # Running statistics that are recomputed too are updated twice, by whoever comes second.
        outcomes.append((losses, {**masters(engine), **(buffers if reentrant is None else {})}))
    assert outcomes[0][0] == outcomes[1][0]
    assert equal(outcomes[0][1], outcomes[1][1])


# ---- random numbers -------------------------------------------------------------------------------------------------


class Dropping(GPT):
    """Dropout after each block, inside what is recomputed; `drawn` has the masks of forwards."""

    class Block(nn.Module):
        def __init__(self, inner: nn.Module, drawn: list[torch.Tensor]) -> None:
            super().__init__()
            self.inner, self.drawn = inner, drawn

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand(x.shape) < 0.8
            self.drawn.append(mask)
            return self.inner(x) * mask

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.drawn: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Dropping.Block(block, self.drawn) for block in self.blocks)


def dropping(recompute: str | None) -> nn.Module:
    with seeded(5):
        return Dropping(recompute=recompute)


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
def test_a_recomputation_draws_what_its_forward_has_drawn(open_engine: Open, nvme_path: Path, recompute: str) -> None:
    outcomes = []
    for kind in (recompute, None):
        with seeded(11):
            outcomes.append(trained(open_engine(dropping(kind), config_of(nvme_path, vertical=True))))
    assert outcomes[0][0] == outcomes[1][0]
    assert equal(outcomes[0][1], outcomes[1][1])


def test_every_micro_batch_draws_numbers_of_its_own(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(dropping(None), config_of(nvme_path, vertical=True))
    with seeded(11):
        trained(engine, steps=2)
    masks = engine.module.drawn
    assert len(masks) == 2 * COUNT * 3
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)


def test_the_generator_goes_on_as_after_the_first_micro_batch(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(dropping(None), config_of(nvme_path, vertical=True))
    with seeded(11):
        trained(engine, steps=1)
        after = torch.get_rng_state()
        torch.manual_seed(11)
        for _ in range(3):
            torch.rand((*tokens(0).shape, 32))
        assert torch.equal(after, torch.get_rng_state())


# ---- what a thread inherits -----------------------------------------------------------------------------------------


def test_autocast_around_the_batch_counts_in_every_micro_batch(open_engine: Open, nvme_path: Path) -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    engine = open_engine(build("gpt"), config_of(nvme_path, vertical=True, bf16=False))
    watched = engine.module.norm
    watched.register_forward_hook(
        lambda *_: seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    )
    with torch.autocast("cpu", torch.bfloat16):
        trained(engine, steps=1)
    assert seen == [(True, torch.bfloat16)] * COUNT


def test_a_batch_may_be_a_dict_or_a_tuple_and_the_loss_in_the_output(open_engine: Open, nvme_path: Path) -> None:
    losses = []
    for name, wrap in (("gpt", lambda t: t), ("gpt", lambda t: (t,)), ("structured", lambda t: {"tokens": t})):
        engine = open_engine(build(name), config_of(nvme_path, vertical=True))
        losses.append(float(engine.train_batch(wrap(tokens(index)) for index in range(COUNT))))
    assert len(set(losses)) == 1


# ---- what ends a batch early ----------------------------------------------------------------------------------------


class Picky(GPT):
    """Raises where it is told to: in the forward before a block, or in the backward behind one."""

    def forward(self, tokens: torch.Tensor, where: str | None = None) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            if (where, index) == ("forward", 1):
                raise Stumbling.Stumble("in forward")
            x = block(x)
            if (where, index) == ("backward", 1):
                x.register_hook(self.stumble)
        return next_token_loss(self.head(self.norm(x)), tokens)

    def stumble(self, gradient: torch.Tensor) -> None:
        raise Stumbling.Stumble("in backward")


def picky() -> nn.Module:
    with seeded(0):
        return Picky()


def as_if_nothing_had_been(engine: Any, open_engine: Open, nvme_path: Path) -> None:
    """It trains as a new one does."""
    assert open_calls(engine) == []
    agree(engine, open_engine(picky(), config_of(nvme_path, vertical=False)))


@pytest.mark.parametrize("vertical", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 2, COUNT - 1])
def test_a_micro_batch_that_fails_takes_the_others_with_it(
    open_engine: Open, nvme_path: Path, where: str, number: int, vertical: bool
) -> None:
    engine = open_engine(picky(), config_of(nvme_path, vertical=vertical))
    threads = threading.active_count()
    with pytest.raises(Stumbling.Stumble, match=where):
        engine.train_batch((tokens(index), where if index == number else None) for index in range(COUNT))
    assert threading.active_count() == threads
    as_if_nothing_had_been(engine, open_engine, nvme_path)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_interrupt_ends_all_micro_batches(open_engine: Open, nvme_path: Path, part: str) -> None:
    engine = open_engine(picky(), config_of(nvme_path, vertical=True))
    threads, once = threading.active_count(), [True]

    def interrupt(*_: Any) -> None:
        if once.pop() if once else False:
            os.kill(os.getpid(), signal.SIGINT)

    block = engine.module.blocks[1]
    register = block.register_forward_pre_hook if part == "forward" else block.register_full_backward_hook
    handle = register(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(batches())
    handle.remove()
    assert threading.active_count() == threads
    as_if_nothing_had_been(engine, open_engine, nvme_path)


def test_a_forward_that_fails_fails_the_batch_whoever_catches_the_error(open_engine: Open, nvme_path: Path) -> None:
    """The others' weights have been let go with its own: they must not compute on."""
    engine = open_engine(picky(), config_of(nvme_path, vertical=True))

    def patient(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        try:
            return engine(batch[1], "forward" if batch[0] == 1 else None)
        except Stumbling.Stumble:
            return engine(batch[1])

    with pytest.raises(Stumbling.Stumble):
        engine.train_batch(((index, tokens(index)) for index in range(COUNT)), patient)
    as_if_nothing_had_been(engine, open_engine, nvme_path)


def test_a_loss_of_submodules_alone_that_fails_leaves_no_unit_in_use(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(picky(), config_of(nvme_path, vertical=True))

    def by_parts(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        model = engine.module
        x = model.blocks[0](model.embedding(batch[1]))
        if batch[0] == 2:
            raise Stumbling.Stumble
        return model.head(x).float().square().mean()

    with pytest.raises(Stumbling.Stumble):
        engine.train_batch(((index, tokens(index)) for index in range(COUNT)), by_parts)
    as_if_nothing_had_been(engine, open_engine, nvme_path)


@pytest.mark.parametrize("calls", [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_micro_batches_may_call_the_engine_as_often_as_they_like(
    open_engine: Open, nvme_path: Path, calls: tuple[int, int]
) -> None:
    outcomes = []
    for vertical in (True, False):
        engine = open_engine(build("gpt"), config_of(nvme_path, vertical=vertical, accumulation=2))

        def loss_of(index: int, engine: Any = engine) -> torch.Tensor:
            own = torch.ones((), requires_grad=True) * 2
            return sum((engine(tokens(index + 7 * call)) for call in range(calls[index % 2])), own)

        losses = [float(engine.train_batch(iter((2 * step, 2 * step + 1)), loss_of)) for step in range(3)]
        outcomes.append((losses, engine.get_global_grad_norm(), masters(engine)))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert equal(outcomes[0][2], outcomes[1][2])


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_leaves_a_micro_batch_behind_that_waits(open_engine: Open, nvme_path: Path) -> None:
    engine, ever = open_engine(picky(), config_of(nvme_path, vertical=True)), threading.Event()
    for delay in (0.5, 1.5):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(batches(), lambda batch: ever.wait() or engine(batch))
    with pytest.raises(StateError, match="close the engine"):
        engine.train_batch(batches())
    ever.set()


def test_torch_has_as_many_threads_in_every_micro_batch_as_around_them(open_engine: Open, nvme_path: Path) -> None:
    engine, seen, before = open_engine(build("gpt"), config_of(nvme_path, vertical=True)), [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            engine.train_batch(batches(), lambda batch: seen.append(torch.get_num_threads()) or engine(batch))
        finally:
            torch.set_num_threads(before)
    assert seen == [1] * COUNT + [2] * COUNT


def test_the_default_device_of_the_thread_is_that_of_every_micro_batch(open_engine: Open, nvme_path: Path) -> None:
    engine, seen = open_engine(build("gpt"), config_of(nvme_path, vertical=True)), []
    given = [tokens(index) for index in range(COUNT)]
    with torch.device("meta"):
        engine.train_batch(iter(given), lambda batch: seen.append(torch.empty(1).device.type) or engine(batch))
    assert seen == ["meta"] * COUNT


def test_a_disk_that_fails_costs_the_batch_and_nothing_else(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(picky(), config_of(nvme_path, vertical=True))
    engine.inject(failing("read"))
    with pytest.raises(StorageError):
        trained(engine, steps=1)
    engine.inject(None)
    as_if_nothing_had_been(engine, open_engine, nvme_path)


def test_data_that_ends_amid_a_batch_is_told(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, vertical=True))
    with pytest.raises(StateError, match="data_iter ended after 3 of 4 micro-batches"):
        engine.train_batch(iter([tokens(0)] * 3))


@pytest.mark.parametrize("vertical", [True, False])
def test_a_batch_is_one_step_also_where_its_boundary_is_set_from_outside(
    open_engine: Open, nvme_path: Path, vertical: bool
) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, vertical=vertical))
    engine.set_gradient_accumulation_boundary(True)
    engine.train_batch(batches())
    assert engine.global_steps == 1


def test_a_batch_is_not_begun_amid_another(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, vertical=True))
    engine.backward(engine(tokens(0)))
    engine.step()
    with pytest.raises(StateError, match="1 micro-batches of this step have already been run one by one"):
        engine.train_batch(batches())


def test_a_model_without_a_loss_needs_loss_of(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(nn.Linear(4, 4), config_of(nvme_path, vertical=True, bf16=False))
    with pytest.raises(ConfigError, match=r"expected the model to return a scalar loss.*got \(2, 4\); pass loss_of"):
        engine.train_batch(iter([torch.ones(2, 4)] * COUNT))


def test_a_pipeline_has_an_order_of_its_own() -> None:
    from zero.pipe import PipelineModule

    model = PipelineModule(layers=[nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 4, "vertical_accumulation": True}
    with pytest.raises(ConfigError, match="vertical_accumulation is not available in a pipeline"):
        zero.initialize(model=model, config={**config, "optimizer": {"type": "AdamW"}})
