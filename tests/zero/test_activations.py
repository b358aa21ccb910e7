"""Saved inputs and saved activations go to their tier and come back; not one bit of a training run depends on it."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HYPER, losses_of, unequal
from lagging import lagging_device
from models import GPT, Stumbling, build, make_config, seeded, tokens, trainability
from probe import (
    activation_capacity_bytes,
    activation_store_of,
    is_torn,
    pieces_in_motion,
    pieces_kept,
    put_activation_disk,
)
from reference import Reference, differences, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zero
from offload.errors import BudgetError, ConfigError, StateError, StorageError
from offload.io.aio import AioFault

Open = Callable[..., Any]
LENGTH, STEPS = 64, 4
INPUT_BYTES = 2 * LENGTH * 32 * 2
"""A block's input: (2, LENGTH, 32) in bf16."""

CALLS: dict[str, Callable[..., Any]] = {
    "checkpoint": zero.checkpointing.checkpoint,
    "non_reentrant_checkpoint": zero.checkpointing.non_reentrant_checkpoint,
    "torch reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch non-reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
    "no recomputation": lambda f, *a: f(*a),
}


def gpt(call: str = "no recomputation", name: str = "gpt", **sizes: Any) -> Any:
    """A model that calls its blocks so; the instance's attribute hides the method."""
    model = build(name, tokens=LENGTH, **sizes)
    if call != "no recomputation":
        run = CALLS[call]
        model.call = lambda block, x: run(block, x) if torch.is_grad_enabled() else block(x)
    return model


def batch(index: int) -> Tensor:
    return tokens(index, length=LENGTH)


def train(trainer: Any, *indices: int) -> list[float]:
    return losses_of(trainer, *(indices or range(STEPS)), loss_of=lambda trainer, index: trainer(batch(index)))


def reference_of(engine: Any, name: str = "gpt", **more: Any) -> Reference:
    return Reference(build(name, tokens=LENGTH), lambda _: HYPER, **more)


def kept(engine: Any) -> int:
    """Bytes on the tier, once what was dropped while it moved has come to rest."""
    gc.collect()
    store = activation_store_of(engine)
    if store is None:
        return 0
    store.check_failure()
    for piece in pieces_in_motion(engine):
        for transfer in (piece.write, piece.read):
            if transfer is not None:
                transfer.wait()
    return int(engine.statistics().activation_kept_bytes)


def with_activations(pair: tuple[str, str], nvme_path: Path, **block: Any) -> dict[str, Any]:
    if block.get("activation_device") == "nvme":
        block["nvme_path"] = str(nvme_path)
    return make_config(pair, nvme_path, activation_checkpointing=block)


def few(often: tuple[str, ...], every: Iterable[str]) -> list[Any]:
    """All of them as parameters; those that are not in `often` belong to the long form."""
    return [pytest.param(name, marks=[] if name in often else [pytest.mark.slow]) for name in every]


MODES = {
    "inputs on the device": ({"contiguous_memory_optimization": True, "number_checkpoints": 3}, "checkpoint"),
    "inputs on the host": ({"cpu_checkpointing": True}, "checkpoint"),
    "inputs on the host, non-reentrant": ({"cpu_checkpointing": True}, "non_reentrant_checkpoint"),
    "inputs on nvme": ({"activation_device": "nvme"}, "checkpoint"),
    "inputs on nvme, non-reentrant": ({"activation_device": "nvme"}, "non_reentrant_checkpoint"),
    "all on the host": ({"activation_device": "cpu", "activation_offloading": True}, "no recomputation"),
    "all on nvme": ({"activation_device": "nvme", "activation_offloading": True}, "no recomputation"),
    "all on nvme around torch's reentrant": (
        {"activation_device": "nvme", "activation_offloading": True}, "torch reentrant"),
    "all on nvme around torch's non-reentrant": (
        {"activation_device": "nvme", "activation_offloading": True}, "torch non-reentrant"),
    "nothing moves": ({}, "checkpoint"),
    "nothing moves, non-reentrant": ({}, "non_reentrant_checkpoint"),
}  # fmt: skip
PAIRS = [("nvme", "nvme"), ("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu")]


@pytest.mark.parametrize("pair", [pytest.param(p, marks=[] if i == 0 else [pytest.mark.slow], id="/".join(p))
                                  for i, p in enumerate(PAIRS)])  # fmt: skip
@pytest.mark.parametrize("mode", few(("inputs on the device", "inputs on nvme", "all on the host",
                                      "all on nvme around torch's reentrant"), MODES))  # fmt: skip
def test_training_is_bit_equal_to_plain_torch_and_nothing_is_left(
    open_engine: Open, nvme_path: Path, nothing_left: None, mode: str, pair: tuple[str, str]
) -> None:
    block, call = MODES[mode]
    engine = open_engine(gpt(call), with_activations(pair, nvme_path, **block))
    reference = reference_of(engine)
    assert train(engine) == train(reference)
    assert unequal_to(engine, reference) == []
    statistics = engine.statistics()
    assert (statistics.activation_stored_bytes > 0) == bool(block)
    assert all(releases >= STEPS for releases in statistics.releases_by_unit.values())
    assert kept(engine) == 0
    engine.close()


def unequal_to(engine: Any, reference: Reference, name: str = "gpt") -> list[str]:
    names = trainability(build(name, tokens=LENGTH))
    return differences(snapshot(engine, names), snapshot(reference, names))


@pytest.mark.parametrize("device", few(("nvme",), ["cpu", "nvme"]))
@pytest.mark.parametrize("call", ["checkpoint", "non_reentrant_checkpoint"])
def test_the_inputs_of_the_blocks_and_nothing_else_are_kept(
    open_engine: Open, nvme_path: Path, device: str, call: str
) -> None:
    engine = open_engine(gpt(call), with_activations(("nvme", "nvme"), nvme_path, activation_device=device))
    plain = open_engine(gpt(call), make_config(("nvme", "nvme"), nvme_path))
    for step in range(1, 4):
        loss = engine(batch(0))
        assert kept(engine) == 3 * INPUT_BYTES
        engine.backward(loss)
        assert kept(engine) == 0
        engine.step()
        train(plain, 0)
        assert engine.statistics().activation_stored_bytes == 3 * INPUT_BYTES * step
        assert engine.statistics().activation_restored_bytes == 3 * INPUT_BYTES * step
    engine.synchronize(), plain.synchronize()
    on_disk = 3 * 3 * INPUT_BYTES if device == "nvme" else 0
    ours, theirs = engine.statistics(), plain.statistics()
    assert ours.nvme_write_bytes - theirs.nvme_write_bytes == on_disk
    assert ours.activation_peak_bytes == 3 * INPUT_BYTES and theirs.activation_peak_bytes == 0


def test_no_parameter_and_no_buffer_is_kept(open_engine: Open, nvme_path: Path) -> None:
    """Weights of 64 KB, a buffer of 16 KB and one activation large enough: only that one is stored."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 256, bias=False), nn.Linear(256, 8, bias=False)
            self.register_buffer("mask", torch.ones(32, 256, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * self.mask).float().square().mean()

    block = {"activation_device": "cpu", "activation_offloading": True}
    config = with_activations(("nvme", "nvme"), nvme_path, **block)
    config["zero_optimization"]["stage3_max_live_parameters"] = 200_000
    engine = open_engine(Wide(), config)
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    loss = engine(x)
    # x, which up saved; the product, which down saved. The mask and both weights stay, the rest is small.
    assert engine.statistics().activation_stored_bytes == 2 * x.nbytes
    engine.backward(loss)
    engine.step()
    assert kept(engine) == 0


@pytest.mark.parametrize(
    "mode",
    few(
        ("all on nvme", "inputs on the host"),
        ["all on the host", "all on nvme", "inputs on the host", "inputs on nvme"],
    ),
)
def test_copies_that_lag_behind_change_nothing(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    block, call = MODES[mode]
    with lagging_device(monkeypatch):
        engine = open_engine(gpt(call), with_activations(("nvme", "nvme"), nvme_path, **block))
        reference = reference_of(engine)
        assert train(engine) == train(reference)
        assert unequal_to(engine, reference) == []
        engine.close()


# ---- random numbers ----------------------------------------------------------------------------


class Noisy(GPT):
    """Dropout in every block, before and after it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.dropout = nn.Dropout(0.3)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.run(lambda x: self.dropout(block(self.dropout(x))), x)

    run: Any = staticmethod(lambda f, x: f(x))


def noisy(call: str) -> Noisy:
    with seeded(3):
        model = Noisy(tokens=LENGTH)
    model.run = CALLS[call]
    return model


@pytest.mark.parametrize("call", ["checkpoint", "non_reentrant_checkpoint", "no recomputation"])
@pytest.mark.parametrize("device", few(("nvme",), ["none", "cpu", "nvme"]))
def test_recomputation_draws_the_same_random_numbers(
    open_engine: Open, nvme_path: Path, call: str, device: str
) -> None:
    block = {"activation_device": device, "activation_offloading": call == "no recomputation" and device != "none"}
    engine = open_engine(noisy(call), with_activations(("nvme", "nvme"), nvme_path, **block))
    reference = Reference(noisy("no recomputation"), lambda _: HYPER)
    losses, states = [], []
    for trainer in (engine, reference):
        with seeded(11):
            losses.append(train(trainer))
            states.append(torch.get_rng_state())
    assert losses[0] == losses[1] and torch.equal(*states)
    names = trainability(noisy("no recomputation"))
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_named_random_states_are_replayed_too(unconfigured: Any) -> None:
    drawn: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        with zero.checkpointing.get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(4))
        drawn.append(torch.rand(4))
        return x.square()

    for call in (zero.checkpointing.checkpoint, zero.checkpointing.non_reentrant_checkpoint):
        drawn.clear()
        with seeded(0):
            zero.checkpointing.model_parallel_cuda_manual_seed(7)
            x = torch.ones(2, requires_grad=True)
            region(x)
            call(region, x).sum().backward()
            region(x)
        first, second, again, last = drawn[0:2], drawn[2:4], drawn[4:6], drawn[6:8]
        assert all(map(torch.equal, second, again))
        assert not any(torch.equal(a, b) for a, b in zip(first + second, second + last, strict=True))
    with pytest.raises(StateError, match="in use"):
        zero.checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 1)
    zero.checkpointing.get_cuda_rng_tracker().reset()
    with pytest.raises(StateError, match="expected one of"), zero.checkpointing.get_cuda_rng_tracker().fork():
        pass


# ---- uses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", few(("all on nvme",), ["inputs on nvme", "all on nvme", "inputs on the host"]))
def test_a_graph_that_is_kept_can_be_walked_again(open_engine: Open, nvme_path: Path, mode: str) -> None:
    block, call = MODES[mode]
    engine = open_engine(gpt(call), with_activations(("nvme", "nvme"), nvme_path, **block))
    reference = reference_of(engine)
    for trainer in (engine, reference):
        loss = trainer(batch(0))
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)
        trainer.step()
        del loss
    assert unequal_to(engine, reference) == [] and kept(engine) == 0


def test_micro_batches_whose_graphs_live_side_by_side_keep_theirs(open_engine: Open, nvme_path: Path) -> None:
    block = {"activation_device": "nvme", "activation_offloading": True}
    config = with_activations(("nvme", "nvme"), nvme_path, **block)
    engine = open_engine(gpt(), {**config, "gradient_accumulation_steps": 2})
    reference = reference_of(engine, accumulation=2)
    for trainer in (engine, reference):
        for step in range(2):
            losses = [trainer(batch(2 * step)), trainer(batch(2 * step + 1))]
            for loss in losses:
                trainer.backward(loss)
                trainer.step()
            del loss, losses
    assert unequal_to(engine, reference) == [] and kept(engine) == 0


def test_evaluation_keeps_nothing(open_engine: Open, nvme_path: Path) -> None:
    block = {"activation_device": "cpu", "activation_offloading": True}
    engine = open_engine(gpt("checkpoint"), with_activations(("nvme", "nvme"), nvme_path, **block))
    with torch.no_grad():
        engine(batch(0))
    assert engine.statistics().activation_stored_bytes == 0


def test_regions_inside_regions_keep_their_inputs_too(open_engine: Open, nvme_path: Path) -> None:
    class Nested(GPT):
        def trunk(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.position[: tokens.shape[1]]
            return self.norm(zero.checkpointing.checkpoint(self.inner, x))

        def inner(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = zero.checkpointing.checkpoint(block, x)
            return x

    with seeded(0):
        model = Nested(tokens=LENGTH)
    engine = open_engine(model, with_activations(("nvme", "nvme"), nvme_path, activation_device="nvme"))
    reference = reference_of(engine)
    assert train(engine) == train(reference) and unequal_to(engine, reference) == []
    # The outer region's input in forward, the inner ones' when it is recomputed; all are the same tensors.
    assert engine.statistics().activation_stored_bytes == STEPS * 4 * INPUT_BYTES


def test_two_engines_keep_theirs_in_stores_of_their_own(open_engine: Open, nvme_path: Path) -> None:
    first = open_engine(gpt("checkpoint"), with_activations(("nvme", "nvme"), nvme_path, activation_device="cpu"))
    second = open_engine(gpt("checkpoint"), with_activations(("nvme", "nvme"), nvme_path, activation_device="nvme"))
    third = open_engine(gpt("checkpoint"), make_config(("nvme", "nvme"), nvme_path))
    losses = [engine(batch(0)) for engine in (first, second, third)]
    assert [kept(engine) for engine in (first, second, third)] == [3 * INPUT_BYTES, 3 * INPUT_BYTES, 0]
    for engine, loss in zip((second, third, first), (losses[1], losses[2], losses[0]), strict=True):
        engine.backward(loss)
        engine.step()
    del loss, losses
    assert unequal(first, second) == unequal(first, third) == [] and kept(first) == kept(second) == 0


# ---- failures ----------------------------------------------------------------------------------


def failing(operation: Any, code: int = errno.EIO) -> AioFault:
    return AioFault(errno=code, fail_rate=1.0, ops=(operation,))


MEMORY = ("none", "none")
"""Weights and states in memory: only activations meet the disk."""


@pytest.mark.parametrize("code", [errno.ENOSPC])
@pytest.mark.parametrize("mode", ["inputs on nvme", "all on nvme"])
def test_an_activation_that_cannot_be_stored_is_told_and_nothing_is_lost(
    open_engine: Open, nvme_path: Path, mode: str, code: int
) -> None:
    block, call = MODES[mode]
    engine = open_engine(gpt(call), with_activations(MEMORY, nvme_path, **block))
    reference = reference_of(engine)
    assert train(engine, 0, 1) == train(reference, 0, 1)
    engine.inject(failing("write", code))
    with pytest.raises(StorageError, match=f"storing saved activations: .*{errno.errorcode[code]}.*free space") as told:
        for _ in range(100):  # the next activation tells it, or a later call: one used before it is written is not
            loss = engine(batch(2))
            engine.backward(loss)
    assert told.value.errno == code and str(nvme_path) in told.value.path and not is_torn(engine)
    engine.inject(None)
    loss = None
    engine.zero_grad()
    assert train(engine, 2, 3) == train(reference, 2, 3)
    assert unequal_to(engine, reference) == []
    del told  # the traceback holds the forward's tensors
    assert kept(engine) == 0


class LateFailure:
    """A disk that says only when asked that it has written nothing: of the first write, and of all others."""

    def __init__(self) -> None:
        self.first, self.others = threading.Event(), threading.Event()
        self._writes = itertools.count()

    async def write(self, offset: int, buffer: Tensor, what: str = "") -> None:
        now = self.others if next(self._writes) else self.first
        while not now.is_set():
            await asyncio.sleep(0.001)
        raise StorageError(what, errno=errno.EIO, path="late", offset=offset, free_bytes=None)


@pytest.mark.parametrize("mode", ["inputs on nvme", "all on nvme"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one first"])
def test_a_backward_goes_on_with_what_could_not_be_stored(
    open_engine: Open, nvme_path: Path, mode: str, at_once: bool
) -> None:
    """Every write of a forward fails behind its back; memory still holds the truth, and one error tells of them."""
    block, call = MODES[mode]
    engine = open_engine(gpt(call), with_activations(MEMORY, nvme_path, **block))
    reference = reference_of(engine)
    disk = LateFailure()
    put_activation_disk(engine, disk)
    loss = engine(batch(0))
    first, *others = [piece.write for piece in pieces_in_motion(engine)]
    assert others
    disk.first.set()
    first.wait()
    for write in others if at_once else ():
        disk.others.set()
        write.wait()
    with pytest.raises(StorageError, match=r"storing saved activations: .*EIO"):
        engine.backward(loss)
    disk.others.set()
    for write in others:
        write.wait()
    engine.backward(loss)
    engine.step()
    del loss
    train(reference, 0)
    assert unequal_to(engine, reference) == [] and kept(engine) == 0


@pytest.mark.parametrize("mode", few(("inputs on nvme",),
                                     ["inputs on nvme", "inputs on nvme, non-reentrant", "all on nvme"]))  # fmt: skip
@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
def test_an_activation_that_cannot_be_read_is_told_and_the_step_can_be_repeated(
    open_engine: Open, nvme_path: Path, mode: str, by_engine: bool
) -> None:
    block, call = MODES[mode]
    engine = open_engine(gpt(call), with_activations(MEMORY, nvme_path, **block))
    reference = reference_of(engine)
    assert train(engine, 0, 1) == train(reference, 0, 1)
    loss = engine(batch(2))
    for piece in pieces_kept(engine):
        if piece.write is not None:
            piece.write.wait()  # what memory still holds needs no disk
    activation_store_of(engine).check_failure()
    engine.inject(failing("read"))
    with pytest.raises(StorageError, match=r"reading saved activations: .*EIO.*offset [\d,]+; free space"):
        engine.backward(loss) if by_engine else loss.backward()
    engine.inject(None)
    with pytest.raises(StateError, match="call zero_grad"):
        engine.step()
    del loss, piece
    engine.zero_grad()
    assert train(engine, 2, 3) == train(reference, 2, 3)
    assert unequal_to(engine, reference) == [] and kept(engine) == 0


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_exception_in_forward_leaves_nothing_kept(open_engine: Open, nvme_path: Path, device: str) -> None:
    with seeded(0):
        model = Stumbling(tokens=LENGTH)
    block = {"activation_device": device, "activation_offloading": True}
    engine = open_engine(model, with_activations(("nvme", "nvme"), nvme_path, **block))
    reference = reference_of(engine)
    model.fail_after = 2
    with pytest.raises(Stumbling.Stumble):
        engine(batch(0))
    model.fail_after = None
    assert engine.statistics().activation_stored_bytes > 0 and kept(engine) == 0
    assert zero.store.saved_tensors.current_activations() is None
    assert train(engine) == train(reference) and unequal_to(engine, reference) == []


def test_an_input_written_to_after_its_region_still_counts_as_it_was(unconfigured: Any) -> None:
    """Torch refuses that; a copy on another tier cannot change."""
    x = torch.ones(64, 64, requires_grad=True)
    unconfigured.configure(None, checkpoint_in_cpu=True)
    y = x * 1
    out = unconfigured.checkpoint(torch.square, y).sum()
    with torch.no_grad():
        y.zero_()
    out.backward()
    assert x.grad is not None and x.grad.eq(2).all()


# ---- settings ----------------------------------------------------------------------------------


def test_the_plan_has_a_row_for_what_was_said_and_a_note_for_what_was_not(open_engine: Open, nvme_path: Path) -> None:
    planned = open_engine(gpt(), with_activations(MEMORY, nvme_path, activation_device="cpu", activation_bytes="1MiB"))
    assert re.search(r"host\s+saved activations\s+1,048,576\n", planned.plan.table())
    free = open_engine(gpt(), with_activations(MEMORY, nvme_path, activation_device="nvme"))
    assert "saved activations go to nvme and come on top" in free.plan.table()
    assert "saved activations" not in open_engine(gpt(), make_config(MEMORY, nvme_path)).plan.table()


def test_what_is_more_than_planned_is_refused_with_the_knob(open_engine: Open, nvme_path: Path) -> None:
    block = {"activation_device": "cpu", "activation_bytes": 2 * INPUT_BYTES}
    engine = open_engine(gpt("checkpoint"), with_activations(MEMORY, nvme_path, **block))
    with pytest.raises(
        BudgetError, match=r"saved activations: 8,192 more bytes .*activation_checkpointing.activation_bytes"
    ):
        engine(batch(0))
    assert kept(engine) == 0


def test_a_host_budget_in_bytes_wants_to_know_the_share_of_activations(open_engine: Open, nvme_path: Path) -> None:
    config = with_activations(("cpu", "cpu"), nvme_path, cpu_checkpointing=True)
    config["memory_budget"] = {"host": "100MB"}
    with pytest.raises(BudgetError, match=r"activation_bytes: expected bytes, because memory_budget.host"):
        open_engine(gpt(), config)
    config["activation_checkpointing"]["activation_bytes"] = "99.9MB"
    with pytest.raises(BudgetError, match=r"memory_budget.host: 100,000,000 bytes are too few"):
        open_engine(gpt(), config)
    config["activation_checkpointing"]["activation_bytes"] = "1MB"
    engine = open_engine(gpt("checkpoint"), config)
    reference = reference_of(engine)
    assert train(engine) == train(reference)


def test_number_checkpoints_takes_memory_for_all_of_them_at_once(open_engine: Open, nvme_path: Path) -> None:
    block = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}
    engine = open_engine(gpt("checkpoint"), with_activations(MEMORY, nvme_path, **block))
    train(engine)
    assert activation_capacity_bytes(activation_store_of(engine)) == 3 * INPUT_BYTES


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"cpu_checkpointing": True, "activation_device": "none"}, 'activation_device: expected "cpu"'),
        ({"activation_offloading": True}, "activation_offloading: expected false"),
        ({"activation_device": "disk"}, '"none" or "cpu" or "nvme"'),
        ({"number_checkpoints": 0}, "number_checkpoints"),
    ],
)
def test_settings_that_contradict_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zero.config.load_config({"activation_checkpointing": block})


def test_settings_without_effect_are_listed() -> None:
    block = {"partition_activations": True, "number_checkpoints": 4, "activation_bytes": 5, "nvme_path": "x"}
    listed = zero.config.load_config({"activation_checkpointing": block}).inactive
    assert sorted(listed) == [f"activation_checkpointing.{key}" for key in sorted(block)]


def test_nvme_without_a_folder_is_refused(open_engine: Open, nvme_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        open_engine(gpt(), make_config(MEMORY, nvme_path, activation_checkpointing={"activation_device": "nvme"}))


# ---- DeepSpeed's names -------------------------------------------------------------------------


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(zero.checkpointing, "_state", zero.checkpointing._State())
    return zero.checkpointing


def test_initialize_configures_and_configure_overrules(open_engine: Open, nvme_path: Path, unconfigured: Any) -> None:
    assert not unconfigured.is_configured()
    engine = open_engine(gpt("checkpoint"), with_activations(MEMORY, nvme_path, cpu_checkpointing=True))
    assert unconfigured.is_configured() and unconfigured._settings().device == "cpu"
    unconfigured.configure(None, checkpoint_in_cpu=False)
    train(engine, 0)
    assert engine.statistics().activation_stored_bytes == 0
    clients = {"offload_optimizer": {"device": "cpu"}, "activation_checkpointing": {"cpu_checkpointing": True}}
    unconfigured.configure(None, deepspeed_config=clients)  # a client's own key is for `initialize` to judge
    train(engine, 1)
    assert engine.statistics().activation_stored_bytes == 3 * INPUT_BYTES


def test_it_works_without_an_engine(unconfigured: Any) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    grads = []
    for settings in ({}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True, "num_checkpoints": 3}):
        unconfigured.configure(None, **settings)
        x = torch.ones(64, 64, requires_grad=True)
        y = x
        for layer in layers:
            y = unconfigured.checkpoint(layer, y)
        layers.zero_grad()
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in layers.parameters())])
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))
    own = [scope.store for scope in unconfigured._state.own_stores.values()]
    assert [store.counters.stored_bytes for store in own] == [3 * 64 * 64 * 4] * 2
    unconfigured.reset()
    assert [activation_capacity_bytes(store) for store in own] == [0, 0]


def test_parameters_get_gradients_where_no_input_needs_one(unconfigured: Any) -> None:
    layer = nn.Linear(8, 8)
    unconfigured.checkpoint(layer, torch.ones(2, 8)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.eq(2).all()


def test_keywords_and_structures_pass(unconfigured: Any) -> None:
    def region(x: Tensor, scale: float, *, other: Tensor, deep: dict[str, Any]) -> tuple[Tensor, str]:
        return x * scale + other * deep["k"], "text"

    for call in (unconfigured.checkpoint, unconfigured.non_reentrant_checkpoint):
        x, other = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        out, text = call(region, x, 3.0, other=other, deep={"k": 5.0})
        out.sum().backward()
        assert text == "text" and x.grad.eq(3).all() and other.grad.eq(5).all()


def test_several_model_parallel_ranks_are_refused_and_one_is_not(unconfigured: Any) -> None:
    class Mpu:
        def __init__(self, size: int) -> None:
            self.get_model_parallel_world_size = lambda: size

    unconfigured.configure(Mpu(1))
    with pytest.raises(ConfigError, match=r"mpu: expected 1 from get_model_parallel_world_size\(\), got 2"):
        unconfigured.configure(Mpu(2))


def test_what_has_no_effect_says_so(unconfigured: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zero"):
        unconfigured.partition_activations_in_checkpoint(True)
    assert "partition_activations: no effect, because there is only one model-parallel rank" in caplog.text
    unconfigured.set_num_layers(5)
    assert unconfigured._settings().number_checkpoints == 5


def test_profile_logs_forward_and_recomputation(unconfigured: Any, caplog: pytest.LogCaptureFixture) -> None:
    unconfigured.configure(None, profile=True, synchronize=True)
    with caplog.at_level(logging.INFO, logger="zero"):
        unconfigured.checkpoint(nn.Linear(8, 8), torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert re.search(r"checkpoint of Linear: forward took [\d.]+ s", caplog.text)
    assert re.search(r"checkpoint of Linear: recomputation took [\d.]+ s", caplog.text)


def test_nvme_without_an_engine_names_what_to_do(unconfigured: Any) -> None:
    unconfigured.configure(None, {"activation_checkpointing": {"activation_device": "nvme", "nvme_path": "/x"}})
    with pytest.raises(ConfigError, match="expected an engine whose config has it"):
        unconfigured.checkpoint(torch.square, torch.ones(64, 64, requires_grad=True))


def test_what_was_configured_before_an_engine_without_a_block_still_counts(
    open_engine: Open, nvme_path: Path, unconfigured: Any
) -> None:
    unconfigured.configure(None, checkpoint_in_cpu=True)
    engine = open_engine(gpt("checkpoint"), make_config(MEMORY, nvme_path))
    reference = reference_of(engine)
    assert train(engine) == train(reference)
    (own,) = unconfigured._state.own_stores.values()
    assert own.store.counters.stored_bytes == STEPS * 3 * INPUT_BYTES


def test_a_closed_engine_serves_nobody(open_engine: Open, nvme_path: Path, unconfigured: Any) -> None:
    engine = open_engine(gpt("checkpoint"), with_activations(MEMORY, nvme_path, cpu_checkpointing=True))
    loss = engine(batch(0))
    engine.close()
    with pytest.raises(StateError, match="closed"):
        loss.backward()
    x = torch.ones(64, 64, requires_grad=True)
    unconfigured.checkpoint(torch.square, x).sum().backward()
    assert x.grad is not None and x.grad.eq(2).all()
