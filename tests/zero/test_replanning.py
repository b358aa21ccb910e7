"""A model may change after `initialize`: what joins is trained from its next forward on, what stays loses nothing.

The witness is the plain-torch reference, continued on a copy of its model that was changed in the same way.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import micro_batch, reference_of
from models import ADAMW, LoraLinear, build, make_config, seeded, tokens
from probe import before_groups_are_adopted
from reference import Reference, changed, differences, snapshot
from torch import nn

import zero
from offload.errors import BudgetError, StateError, StorageError
from offload.io.aio import AioFault
from zero.params.binding import UnitBinding
from zero.params.released_parameter import ReleasedParameter, is_managed

Open = Callable[..., Any]
Change = Callable[[nn.Module], None]
PAIRS = [("none", "none"), ("none", "nvme"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")]


def run(trainer: Any, indices: range) -> None:
    for index in indices:
        micro_batch(trainer, index)


def assert_equal(engine: Any, reference: Reference) -> None:
    """All weights; master, moments and step count of what the reference has a state for."""
    names = [(name, name in reference.states) for name, _ in reference.model.named_parameters()]
    assert [name for name, _ in engine.module.named_parameters()] == [name for name, _ in names]
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def add_adapters(model: Any) -> None:
    with seeded(11):
        for block in model.blocks:
            block.attention.qkv = LoraLinear(block.attention.qkv)
            block.up = LoraLinear(block.up)


def freeze_and_adapt(model: Any) -> None:
    model.requires_grad_(False)
    add_adapters(model)


def add_layer(model: Any) -> None:
    with seeded(12):
        model.norm = nn.Sequential(model.norm, nn.Linear(32, 32))


def replace_head(model: Any) -> None:
    with seeded(13):
        model.head = nn.Linear(32, 64, bias=False)


def remove_block(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])


def freeze_trunk(model: Any) -> None:
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)


CHANGES: dict[str, Change] = {
    "adapters": add_adapters,
    "frozen base, adapters": freeze_and_adapt,
    "layer": add_layer,
    "head replaced": replace_head,
    "block removed": remove_block,
    "trunk frozen": freeze_trunk,
}


# ---- equal to a run that was always so ------------------------------------------------------------


def pairwise() -> list[Any]:
    """Every change and every pair of tiers at least once; the rest of the product with the long forms."""
    product = [(name, pair) for name in CHANGES for pair in PAIRS]
    keys = list(CHANGES)
    kept = {(name, PAIRS[(2 * i + 4) % len(PAIRS)]) for i, name in enumerate(keys)}
    return [
        pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}", marks=() if case in kept else pytest.mark.slow)
        for case in product
    ]


@pytest.mark.parametrize(("name", "pair"), pairwise())
def test_training_goes_on_with_every_bit(
    open_engine: Open, nvme_path: Path, nothing_left: None, pair: tuple[str, str], name: str
) -> None:
    model, reference = build("gpt"), reference_of(build("gpt"))
    engine = open_engine(model, make_config(pair, nvme_path))
    for trainer in (engine, reference):
        run(trainer, range(3))
    CHANGES[name](model)
    reference = changed(reference, CHANGES[name])
    for trainer in (engine, reference):
        run(trainer, range(3, 6))
    assert_equal(engine, reference)
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    engine.close()
    gc.collect()


@pytest.mark.parametrize(
    ("after", "pair", "bf16"),
    [
        (1, ("none", "none"), True),
        (2, ("nvme", "nvme"), False),
        (3, ("nvme", "nvme"), True),
        (1, ("cpu", "cpu"), False),
    ],
)
def test_gradients_accumulated_before_a_change_are_in_the_step_after_it(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], after: int, bf16: bool
) -> None:
    """Four micro-batches a step; the change comes after some of them."""
    model, reference = build("gpt"), reference_of(build("gpt"), bf16=bf16, accumulation=4)
    engine = open_engine(model, make_config(pair, nvme_path, accumulation=4, bf16=bf16))
    for trainer in (engine, reference):
        run(trainer, range(4 + after))
    add_adapters(model)
    reference = changed(reference, add_adapters)
    for trainer in (engine, reference):
        run(trainer, range(4 + after, 12))
    assert_equal(engine, reference)


def test_a_gradient_that_was_summed_unannounced_moves_too(open_engine: Open, nvme_path: Path) -> None:
    """Two backwards before the step, with one announced: the unit's gradient has an fp32 home of its own."""
    model, reference = build("gpt"), reference_of(build("gpt"))
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    for trainer in (engine, reference):
        for index in range(2):
            trainer.backward(trainer(tokens(index)))
    add_layer(model)
    reference = changed(reference, add_layer)
    for trainer in (engine, reference):
        run(trainer, range(2, 5))
    assert_equal(engine, reference)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_narrow_moments_go_along(open_engine: Open, nvme_path: Path, states: str) -> None:
    """A unit that stays as it is keeps the codes of its moments."""
    model: Any = build("gpt")
    config = make_config(("nvme", "nvme"), nvme_path, zero={"offload_optimizer": {"state_dtype": states}})
    engine = open_engine(model, config)
    run(engine, range(3))
    names = [name for name, _ in model.named_parameters()]
    before = {name: engine.full_state(name) for name in names}
    add_layer(model)
    assert engine.replan()
    for name in (name for name in names if not name.startswith("norm.")):
        state = engine.full_state(name)
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], before[name][key]), (name, key)


@pytest.mark.parametrize("pair", [("nvme", "nvme")], ids="-".join)
def test_a_frozen_parameter_that_thaws_joins_and_one_that_freezes_keeps_its_moments(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    """Two adapters take turns, three times over; only the first was trainable when the engine was made."""

    def switch(model: Any, trained: int) -> None:
        for number in (0, 1):
            model.blocks[number].requires_grad_(number == trained)

    model: Any = build("gpt")
    switch(model, 0)
    model.blocks[1].requires_grad_(False)
    for p in model.blocks[1].parameters():
        p.data = p.data.bfloat16().float()  # how frozen values are rounded is no promise
    reference = reference_of(copy.deepcopy(model))
    engine = open_engine(model, make_config(pair, nvme_path))
    plans = []
    for turn in range(6):
        switch(model, turn % 2)
        reference = changed(reference, lambda m, turn=turn: switch(m, turn % 2))
        # A parameter that freezes has its state in torch's optimizer still; the reference gets it back.
        for trainer in (engine, reference):
            run(trainer, range(2 * turn, 2 * turn + 2))
        plans.append(engine.plan)
    assert_equal(engine, reference)
    assert len({id(plan) for plan in plans}) == 2, "only what had never been trained needs another plan"
    assert engine.full_state("blocks.1.up.weight")["step"] == 6 and engine.full_state("norm.weight")["step"] == 12


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_frozen_parameter_that_thaws_joins_the_group_it_was_passed_in(
    open_engine: Open, nvme_path: Path, kind: str
) -> None:
    model: Any = build("gpt")
    model.blocks.requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    groups = [{"params": rest}, {"params": model.blocks.parameters(), "lr": 1e-5, "weight_decay": 0.0}]
    config = make_config(("nvme", "nvme"), nvme_path, optimizer={"type": kind, "params": {"lr": 1e-3}})
    engine = open_engine(model, config, model_parameters=groups)
    run(engine, range(1))
    model.blocks.requires_grad_(True)
    run(engine, range(1, 2))
    first, second = engine.optimizer.param_groups
    assert {id(p) for p in first["params"]} == {id(p) for p in rest}
    assert {id(p) for p in second["params"]} == {id(p) for p in model.blocks.parameters()}
    assert (second["lr"], second["weight_decay"]) == (1e-5, 0.0)


def test_a_frozen_unit_costs_no_update(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    run(engine, range(2))
    freeze_trunk(model)
    engine.synchronize()
    before = engine.statistics()
    run(engine, range(2, 4))
    engine.synchronize()
    written = engine.statistics().nvme_write_bytes - before.nvme_write_bytes
    rest = sum(u.numel for u in engine.units if not u.name.startswith(("blocks", "embedding")))
    assert 0 < written <= 2 * 12 * rest


# ---- who trains what ------------------------------------------------------------------------------


def test_param_groups_and_scheduler_stay_the_same_objects(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    decay, plain = [[p for p in model.parameters() if (p.dim() > 1) is wish] for wish in (True, False)]
    engine, optimizer, _, scheduler = zero.initialize(
        model=model,
        config=make_config(("nvme", "nvme"), nvme_path),
        model_parameters=[{"params": decay}, {"params": plain, "weight_decay": 0.0}],
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    )
    try:
        groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
        run(engine, range(2))
        with seeded(1):
            model.norm = nn.LayerNorm(32)  # takes over the names of what it replaces, and their group
            model.head = nn.Sequential(nn.Linear(32, 32), model.head)
        run(engine, range(2, 4))
        assert engine.optimizer is optimizer and optimizer.param_groups is groups and engine.lr_scheduler is scheduler
        assert all(group["params"] is known for group, known in zip(groups, lists, strict=True))
        assert any(p is model.norm.weight for p in lists[1]) and any(p is model.head[0].bias for p in lists[0])
        assert sum(len(known) for known in lists) == len(list(model.parameters()))
        assert groups[0]["lr"] == ADAMW["lr"] * 0.5**4 and scheduler.last_epoch == 4
        assert engine.full_state("norm.weight")["step"] == 2 and engine.full_state("head.1.weight")["step"] == 4
    finally:
        engine.close()


def test_a_group_that_the_user_adds_is_used_and_one_that_is_emptied_gives_its_states_up(
    open_engine: Open, nvme_path: Path
) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    run(engine, range(2))
    with seeded(1):
        model.extra = nn.Linear(32, 32)
        model.norm = nn.Sequential(model.norm, model.extra)
    engine.optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.0, "weight_decay": 0.0})
    head = model.head.weight
    first = engine.optimizer.param_groups[0]
    first["params"] = [p for p in first["params"] if p is not head]
    start = model.extra.weight.detach().clone()
    run(engine, range(2, 4))
    assert torch.equal(engine.full_master("extra.weight"), start) and engine.full_state("extra.weight")["step"] == 2
    with pytest.raises(StateError, match=r"head\.weight"):
        engine.full_state("head.weight")


def test_what_was_left_out_of_the_optimizer_on_purpose_stays_out(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    config = make_config(("nvme", "nvme"), nvme_path)
    engine = open_engine(model, config, model_parameters=list(model.head.parameters()))
    plan = engine.plan
    run(engine, range(2))
    assert engine.plan is plan
    add_layer(model)
    run(engine, range(2, 4))
    assert len(engine.optimizer.param_groups[0]["params"]) == 3, "head, and weight and bias of the new layer"


def test_an_evaluation_engine_takes_new_parameters_too(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    config = make_config(("nvme", "none"), nvme_path, optimizer={})
    engine = open_engine(model, config)
    plain = build("gpt").bfloat16()
    add_layer(model)
    add_layer(plain)
    plain.bfloat16()
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), plain(tokens(0)))
    assert isinstance(model.norm[1].weight, ReleasedParameter)  # type: ignore[index, union-attr]


def test_what_leaves_the_model_has_its_values_and_may_come_back(open_engine: Open, nvme_path: Path) -> None:
    model, reference = build("gpt"), reference_of(build("gpt"))
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    for trainer in (engine, reference):
        run(trainer, range(2))
    block: Any = model.blocks[1]  # type: ignore[index, union-attr]
    remove_block(model)
    assert engine.replan() and not engine.replan()
    for name, parameter in block.named_parameters():
        assert not is_managed(parameter)
        assert torch.equal(parameter.detach(), reference.full_master(f"blocks.1.{name}")), name
    model.blocks.insert(1, block)  # type: ignore[operator, union-attr]
    run(engine, range(2, 3))
    assert engine.full_state("blocks.1.up.weight")["step"] == 1, "its moments are gone, as those of a new parameter"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_from_before_the_first_forward_of_the_engine_counts(
    open_engine: Open, nvme_path: Path, sparse: bool
) -> None:
    """Run as an ordinary module on the side, a new layer has a gradient when the engine takes it up."""
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("cpu", "nvme"), nvme_path))
    run(engine, range(1))
    model.aside = nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(4, 2)
    model.aside(torch.tensor([0, 2, 2]) if sparse else torch.ones(3, 4)).sum().backward()
    expected = model.aside.weight.grad.to_dense().clone()
    run(engine, range(1, 2))
    # beta1 = 0.9: the first moment of a first step is a tenth of its gradient, which bf16 holds exactly.
    assert torch.equal(engine.full_state("aside.weight")["exp_avg"], expected * torch.tensor(1 - 0.9))
    assert model.aside.weight.grad is None


# ---- what goes wrong ------------------------------------------------------------------------------


def test_a_graph_from_before_the_change_is_refused(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    old = engine(tokens(0))
    add_layer(model)
    new = engine(tokens(1))
    with pytest.raises(StateError, match="change of the model"):
        engine.backward(old)
    engine.zero_grad()
    engine.backward(new)
    engine.step()


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_disk_that_fails_leaves_the_old_plan_and_the_next_forward_tries_again(
    open_engine: Open, nvme_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, reference = build("gpt"), reference_of(build("gpt"))
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    for trainer in (engine, reference):
        run(trainer, range(3))
    add_layer(model)
    reference = changed(reference, add_layer)
    plan = engine.plan
    engine.synchronize()
    if where == "read":
        engine.inject(AioFault(errno=5, fail_rate=1.0, ops=("read",), skip=5))
    else:
        calls = iter(range(100))

        def fails(group: Any) -> None:
            if next(calls) == 4:
                raise StorageError("write", errno=28, path="there", offset=0, free_bytes=0)

        before_groups_are_adopted(fails, monkeypatch)
    with pytest.raises(StorageError):
        engine(tokens(3))
    monkeypatch.undo()
    monkeypatch.setenv("ZERO_DEVICE", "cpu")
    engine.inject(None)
    assert engine.plan is plan and all(is_managed(p) for p in model.blocks.parameters())  # type: ignore[union-attr]
    assert not is_managed(model.norm[1].weight)  # type: ignore[index, union-attr]
    for trainer in (engine, reference):
        run(trainer, range(3, 6))
    assert engine.plan is not plan
    assert_equal(engine, reference)
    engine.close()
    gc.collect()


def test_a_change_that_does_not_fit_is_refused_and_can_be_taken_back(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, memory_budget={"device": 600_000}))
    run(engine, range(2))
    model.huge = nn.Conv1d(400, 400, 1)  # alone more than the budget, and no Linear, which would be tiled
    with pytest.raises(BudgetError, match=r"memory_budget\.device.*huge"):
        engine(tokens(2))
    del model.huge
    run(engine, range(2, 4))
    assert engine.full_state("norm.weight")["step"] == 4


def test_inside_a_gather_the_change_waits(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    with zero.GatheredParameters(model.head.weight):
        model.head.extra = nn.Parameter(torch.ones(3))
        with pytest.raises(StateError, match="GatheredParameters"):
            engine.replan()
        engine(tokens(0))
        assert not is_managed(model.head.extra)
    engine(tokens(0))
    assert is_managed(model.head.extra)


# ---- what one sees of it --------------------------------------------------------------------------


def test_one_line_says_what_it_cost_and_statistics_go_on(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    run(engine, range(2))
    engine.synchronize()
    before = engine.statistics()
    add_adapters(model)
    with caplog.at_level(logging.INFO, "zero"):
        run(engine, range(2, 3))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "12 parameters (blocks.0.attention.qkv.low, " in lines[0] and "existed" in lines[0]
    after = engine.statistics()
    for name in ("nvme_read_bytes", "nvme_write_bytes", "gathers", "prefetch_misses", "exposed_wait_seconds"):
        assert getattr(after, name) > getattr(before, name), name
    assert after.steps == 3 and after.nvme_read_seconds >= before.nvme_read_seconds


def test_a_model_that_does_not_change_is_planned_once(open_engine: Open, nvme_path: Path) -> None:
    for name in ("gpt", "tied", "lora", "mixed", "odd_sizes"):
        engine = open_engine(build(name), make_config(("cpu", "nvme"), nvme_path))
        plan = engine.plan
        run(engine, range(2))
        assert engine.plan is plan


def test_changes_again_and_again_leave_one_storage(open_engine: Open, nvme_path: Path, nothing_left: None) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path))
    threads, files = [], []
    for turn in range(4):
        model.register_parameter(f"late{turn}", nn.Parameter(torch.ones(4)))
        run(engine, range(turn, turn + 1))
        threads.append(threading.active_count())
        files.append(len(os.listdir("/proc/self/fd")))
    assert len(set(threads)) == 1 and len(set(files)) == 1
    engine.close()
    gc.collect()


# ---- peft -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [pytest.param(("cpu", "cpu"), marks=pytest.mark.slow), ("nvme", "nvme")], ids="-".join)
def test_peft_adapters_come_go_and_switch(open_engine: Open, nvme_path: Path, pair: tuple[str, str]) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    with seeded(0):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    llama.requires_grad_(False)
    engine = open_engine(llama, make_config(pair, nvme_path))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with seeded(1):
        llama.add_adapter(lora, "first")
        llama.add_adapter(lora, "second")

    def weights(adapter: str) -> dict[str, torch.Tensor]:
        return {n: engine.full_parameter(n) for n, _ in llama.named_parameters() if f".{adapter}." in n}

    def train(index: int) -> None:
        engine.backward(engine(input_ids=tokens(index), labels=tokens(index)).loss)
        engine.step()

    train(0)
    base = engine.full_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")
    first, second = weights("first"), weights("second")
    assert first.keys() and len(first) == len(second) == 8
    llama.set_adapter("first")
    train(1)
    assert all(not torch.equal(value, first[name]) for name, value in weights("first").items())
    assert all(torch.equal(value, second[name]) for name, value in weights("second").items())
    first = weights("first")
    llama.set_adapter("second")
    train(2)
    assert all(torch.equal(value, first[name]) for name, value in weights("first").items())
    assert all(not torch.equal(value, second[name]) for name, value in weights("second").items())
    llama.delete_adapter("first")
    train(3)
    assert not weights("first") and len(engine.optimizer.param_groups[0]["params"]) == 8
    assert torch.equal(engine.full_parameter("model.layers.0.self_attn.q_proj.base_layer.weight"), base)


def test_a_change_that_an_inference_takes_up_leaves_a_model_that_trains(open_engine: Open, nvme_path: Path) -> None:
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
        run(engine, range(1))
        with seeded(5):
            engine.module.head = LoraLinear(engine.module.head)
        engine.eval()
        with mode():
            engine(tokens(9))
        engine.train()
        assert not any(parameter.is_inference() for parameter in engine.module.parameters())
        run(engine, range(1, 3))
        ends.append({name: engine.full_master(name) for name, p in engine.module.named_parameters() if p.requires_grad})
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_an_interrupt_while_the_planes_are_exchanged_waits_until_they_are(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    run(engine, range(2))
    add_layer(engine.module)
    real, calls = UnitBinding.adopt, itertools.count()

    def adopt(*arguments: Any) -> None:
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        real(*arguments)

    monkeypatch.setattr(UnitBinding, "adopt", adopt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.replan()
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert not engine.run.closed and not engine.replan(), "the model is planned"
    run(engine, range(2, 4))


def test_a_written_gradient_replaces_what_was_collected_though_the_model_changes(
    open_engine: Open, nvme_path: Path
) -> None:
    config = {**make_config(("nvme", "nvme"), nvme_path, bf16=False), "gradient_accumulation_steps": 2}
    found = []
    for change in (False, True):
        engine = open_engine(build("gpt"), config)
        engine.backward(engine(tokens(0)))
        engine.step()
        engine.module.head.weight.grad = torch.zeros(engine.module.head.weight.shape)
        if change:
            engine.module.spare = nn.Linear(4, 4)
        engine.backward(engine(tokens(1)))
        engine.step()
        found.append(engine.full_parameter("head.weight"))
    assert torch.equal(*found)
