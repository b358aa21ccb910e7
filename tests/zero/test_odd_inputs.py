"""Inputs nobody plans for: empty and huge parameters, exceptions, stale graphs, evaluation in the middle of things."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import masters, micro_batch, reference_of, unequal
from models import BigEmbedding, build, make_config, patterned, seeded, tokens, trainability
from reference import Reference, differences, snapshot
from torch import Tensor, nn

import zero
from offload.errors import ConfigError, StateError

Open = Callable[..., Any]
NVME = ("nvme", "nvme")


def reference_after(model: str, engine: Any, steps: int, clipping: float = 0.0) -> Reference:
    reference = reference_of(model, clipping=clipping)
    for index in range(steps):
        micro_batch(reference, index)
    return reference


def assert_equal(engine: Any, reference: Reference, model: str) -> None:
    assert unequal(engine, reference, model) == []


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "nvme"), ("none", "none")], ids="-".join)
@pytest.mark.parametrize("threshold", [0, 1, 600])
def test_parameters_of_0_1_and_513_elements_train(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], threshold: int
) -> None:
    keys = {"stage3_param_persistence_threshold": threshold}
    engine = open_engine(build("odd_sizes"), make_config(pair, nvme_path, clipping=0.3, zero=keys))
    for index in range(8):
        micro_batch(engine, index)
    assert_equal(engine, reference_after("odd_sizes", engine, 8, clipping=0.3), "odd_sizes")
    assert engine.full_parameter("nothing").shape == (0,)
    assert engine.full_parameter("scalar").shape == ()


def embedding_after(engine: Any, model_rows: int, steps: int) -> tuple[list[int], Reference]:
    """Train on a few rows of a huge table, and the same on a table of only those rows and a few bystanders.

    AdamW moves every row (decay); bystanders at both ends and in the middle stand for those no batch touched.
    """
    generator = torch.Generator().manual_seed(7)
    touched = torch.randint(0, model_rows, (24,), generator=generator).unique().tolist()
    bystanders = [0, 1, model_rows // 2 + 1, model_rows - 2, model_rows - 1]
    rows = sorted({*touched, *bystanders})
    with seeded(0):
        small = BigEmbedding(2)
    table = torch.cat([patterned(1, small.table.embedding_dim, first=row) for row in rows])
    small.table = nn.Embedding(len(rows), small.table.embedding_dim, _weight=table)
    reference = reference_of(SmallTable(small, rows))
    for _ in range(steps):
        picked = torch.tensor(touched)[torch.randint(0, len(touched), (16,), generator=generator)]
        for trainer in (engine, reference):
            trainer.backward(trainer(picked))
            trainer.step()
    return rows, reference


class SmallTable(nn.Module):
    """A BigEmbedding of chosen rows, called with the row numbers of the big one."""

    def __init__(self, inner: BigEmbedding, rows: list[int]) -> None:
        super().__init__()
        self.inner, self.position = inner, {row: index for index, row in enumerate(rows)}

    def forward(self, rows: Tensor) -> Tensor:
        small = torch.tensor([self.position[int(row)] for row in rows])
        x = self.inner.table(small)
        logits = self.inner.head(x).float()
        return nn.functional.cross_entropy(logits, rows % self.inner.head.out_features)


@pytest.mark.parametrize(
    ("rows", "host_bytes"),
    [
        pytest.param(312_500, 24 << 20, id="20 M elements, 24 MiB"),
        pytest.param(3_125_000, 64 << 20, id="200 M elements, 64 MiB", marks=pytest.mark.slow),
    ],
)
def test_a_huge_embedding_trains_through_a_small_arena(
    open_engine: Open, nvme_path: Any, rows: int, host_bytes: int
) -> None:
    zero_keys = {"stage3_max_live_parameters": 1_000_000_000}
    config = make_config(NVME, nvme_path, zero=zero_keys, memory_budget={"host": host_bytes})
    with seeded(0):
        model = BigEmbedding(rows)
    engine = open_engine(model, config)
    del model
    gc.collect()
    kept, reference = embedding_after(engine, rows, steps=3)
    assert 0 < engine.statistics().arena_peak_bytes <= host_bytes
    weight = engine.full_parameter("table.weight")
    assert torch.equal(weight[kept], reference.full_parameter("inner.table.weight"))
    del weight
    master = engine.full_master("table.weight")
    assert torch.equal(master[kept], reference.full_master("inner.table.weight"))
    del master
    assert torch.equal(engine.full_parameter("head.weight"), reference.full_parameter("inner.head.weight"))


def test_a_unit_larger_than_the_arena_trains(open_engine: Open, nvme_path: Any) -> None:
    """The parameter arena holds 2 x 4096 elements; a block has 12.7 k, the table 40 k."""
    keys = {
        "offload_param": {"buffer_count": 2, "buffer_size": 4096},
        "sub_group_size": 4096,
        "stage3_max_live_parameters": 200_000,
    }
    engine = open_engine(build("gpt", vocab=1250), make_config(NVME, nvme_path, zero=keys))
    for index in range(4):
        micro_batch(engine, index)
    reference = reference_of(build("gpt", vocab=1250))
    for index in range(4):
        micro_batch(reference, index)
    names = trainability(build("gpt", vocab=1250))
    assert max(unit.numel for unit in engine.units) >= 40_000
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


# ---- exceptions and stale graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "cpu"), ("none", "nvme")], ids="-".join)
@pytest.mark.parametrize("fail_after", [0, 1, 2])
@pytest.mark.parametrize("when", [0, 3])
def test_an_exception_inside_forward_leaves_no_trace_in_later_steps(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], fail_after: int, when: int
) -> None:
    model: Any = build("stumbling")
    engine = open_engine(model, make_config(pair, nvme_path, clipping=0.3))
    for index in range(6):
        if index == when:
            model.fail_after = fail_after
            with pytest.raises(type(model).Stumble):
                engine(tokens(99))
            model.fail_after = None
        micro_batch(engine, index)
    assert_equal(engine, reference_after("stumbling", engine, 6, clipping=0.3), "stumbling")


@pytest.mark.parametrize("pair", [NVME, ("cpu", "cpu"), ("none", "nvme")], ids="-".join)
@pytest.mark.parametrize("fail_back_at", [0, 2])
def test_an_exception_inside_backward_is_forgotten_after_zero_grad(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], fail_back_at: int
) -> None:
    model: Any = build("stumbling")
    engine = open_engine(model, make_config(pair, nvme_path, clipping=0.3))
    for index in range(5):
        if index == 2:
            model.fail_back_at = fail_back_at
            with pytest.raises(type(model).Stumble):
                engine.backward(engine(tokens(99)))
            model.fail_back_at = None
            engine.zero_grad()
        micro_batch(engine, index)
    assert_equal(engine, reference_after("stumbling", engine, 5, clipping=0.3), "stumbling")


def test_zero_grad_forgets_what_was_accumulated(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, clipping=0.3))
    for index in range(4):
        engine.backward(engine(tokens(60 + index)))
        engine.zero_grad()
        micro_batch(engine, index)
    assert_equal(engine, reference_after("gpt", engine, 4, clipping=0.3), "gpt")


@pytest.mark.parametrize("pair", [NVME, ("cpu", "none")], ids="-".join)
def test_a_backward_started_by_torch_instead_of_the_engine_counts_too(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, clipping=0.3))
    for index in range(4):
        engine(tokens(index)).backward()
        engine.step()
    assert_equal(engine, reference_after("gpt", engine, 4, clipping=0.3), "gpt")


def test_exceptions_inside_forward_never_pile_up_live_elements(open_engine: Open, nvme_path: Any) -> None:
    model: Any = build("stumbling")
    limit = 30_000
    engine = open_engine(model, make_config(NVME, nvme_path, zero={"stage3_max_live_parameters": limit}))
    for attempt in range(6):
        model.fail_after = attempt % 3
        with pytest.raises(type(model).Stumble):
            engine(tokens(attempt))
    model.fail_after = None
    micro_batch(engine, 0)
    assert engine.statistics().live_numel_peak <= limit


def test_an_exception_of_the_loss_between_forward_and_backward_is_forgotten(open_engine: Open, nvme_path: Any) -> None:
    """The user's loss fails, the graph is dropped, the next batch trains."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    for index in range(5):
        if index == 2:
            abandoned = engine(tokens(99))
            del abandoned
        micro_batch(engine, index)
    assert_equal(engine, reference_after("gpt", engine, 5), "gpt")


@pytest.mark.parametrize("pair", [NVME, ("none", "cpu")], ids="-".join)
def test_backward_through_a_graph_older_than_the_last_step_raises(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    stale = engine(tokens(0))
    micro_batch(engine, 1)
    with pytest.raises((StateError, RuntimeError)):
        engine.backward(stale)
    micro_batch(engine, 2)  # and life goes on


def test_a_second_backward_through_a_freed_graph_raises_and_the_next_step_is_clean(
    open_engine: Open, nvme_path: Any
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    loss = engine(tokens(0))
    engine.backward(loss)
    with pytest.raises(RuntimeError):
        engine.backward(loss)
    engine.step()
    micro_batch(engine, 1)
    assert_equal(engine, reference_after("gpt", engine, 2), "gpt")


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "nvme"), ("none", "none")], ids="-".join)
@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_between_steps_leaves_training_bit_equal(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], no_grad: bool
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, clipping=0.3))
    reference = reference_of(clipping=0.3)
    for index in range(6):
        micro_batch(engine, index)
        micro_batch(reference, index)
        if index % 2:
            losses = []
            for trainer in (engine, reference):
                trainer.eval()
                with torch.set_grad_enabled(not no_grad):
                    losses.append(float(trainer(tokens(50 + index)).detach()))
                trainer.train()
            assert losses[0] == losses[1]
    assert_equal(engine, reference, "gpt")


def test_evaluation_between_the_micro_batches_of_a_step_changes_nothing(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, accumulation=2, clipping=0.3))
    reference = reference_of(clipping=0.3, accumulation=2)
    for index in range(8):
        micro_batch(engine, index)
        micro_batch(reference, index)
        engine.eval()
        with torch.no_grad():
            engine(tokens(70 + index))
        engine.train()
    assert_equal(engine, reference, "gpt")


class Convolutions(nn.Module):
    def __init__(self, dimensions: int) -> None:
        super().__init__()
        kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.convs = nn.ModuleList(kind(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x))
        return x.float().square().mean()


@pytest.mark.parametrize("dimensions", [2, 3])
def test_weights_in_channels_last_keep_their_values_and_a_warning_says_what_they_lose(
    open_engine: Open, nvme_path: Any, caplog: pytest.LogCaptureFixture, dimensions: int
) -> None:
    last = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    with seeded(2):
        x = torch.randn(2, 4, *[5] * dimensions).contiguous(memory_format=last)
    outcomes = []
    for memory_format in (torch.contiguous_format, last):
        with seeded(1):
            model = Convolutions(dimensions).to(memory_format=memory_format)
        with caplog.at_level("WARNING", "zero"):
            engine = open_engine(model, make_config(NVME, nvme_path, bf16=False))
        for _ in range(3):
            engine.backward(engine(x))
            engine.step()
        told = "2 parameters (convs.0.weight, ...) were in channels_last format" in caplog.text
        assert told == (memory_format == last)
        outcomes.append({name: engine.full_parameter(name) for name, _ in model.named_parameters()})
        engine.close()
    for name, value in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], value, msg=name)


class Adding(nn.Linear):
    """Adds what it is given to what it computes, as masks and biases are."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return torch.relu(super().forward(x)) + bias


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding(32, 32) for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, bias)
        return x.float().square().mean()


def test_inputs_that_were_made_in_inference_mode_train_as_others(open_engine: Open, nvme_path: Any) -> None:
    outcomes = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), seeded(5):
            bias = torch.randn(4, 32, dtype=torch.bfloat16)
        with seeded(1):
            engine = open_engine(Weighted(), make_config(NVME, nvme_path))
        for _ in range(3):
            engine.backward(engine(torch.ones(4, 32, dtype=torch.bfloat16), bias))
            engine.step()
        outcomes.append({name: engine.full_parameter(name) for name, _ in engine.module.named_parameters()})
        engine.close()
    first, second = outcomes
    assert bias.is_inference() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_embeddings_give_as_sparse_tensors_count_as_dense_ones(
    open_engine: Open, nvme_path: Any, stage: int
) -> None:
    outcomes = []
    for sparse in (False, True):
        with seeded(1):
            model = nn.Sequential(nn.Embedding(64, 32, sparse=sparse), nn.Linear(32, 8))
        config = make_config(NVME, nvme_path, accumulation=2, zero={"stage": stage}, sparse_gradients=sparse)
        engine = open_engine(model, config)
        for index in range(4):
            engine.backward(engine(tokens(index)).square().mean())
            engine.step()
        outcomes.append(masters(engine))
        engine.close()
    dense, sparse_ones = outcomes
    assert all(torch.equal(dense[name], sparse_ones[name]) for name in dense)


@pytest.mark.parametrize("pair", [NVME, ("cpu", "none"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("alias", [True, False], ids=["alias", "copy"])
def test_forward_alone_computes_what_the_plain_model_computes(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], mode: Any, alias: bool
) -> None:
    monkeypatch.setenv("ZERO_NO_ALIAS", "0" if alias else "1")
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    plain = reference_of()
    before = engine.statistics()
    engine.eval()
    with mode():
        for index in range(4):
            assert float(engine(tokens(index))) == float(plain(tokens(index)))
    after = engine.statistics()
    assert after.steps == 0 and after.gathered_bytes > before.gathered_bytes
    assert after.nvme_write_bytes == before.nvme_write_bytes


@pytest.mark.parametrize("kind", ["AdamW", "Adamax"])
@pytest.mark.parametrize("bf16", [True, False])
def test_an_evaluation_in_inference_mode_right_behind_a_step_changes_nothing(
    open_engine: Open, nvme_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str, bf16: bool
) -> None:
    """It brings the updates; without aliases weights of the host are copied."""
    monkeypatch.setenv("ZERO_NO_ALIAS", "1")
    held = []
    for evaluates in (True, False):
        optimizer = {"type": kind, "params": {"lr": 1e-2}}
        engine = open_engine(build("gpt"), make_config(NVME, nvme_path, bf16=bf16, optimizer=optimizer))
        for index in range(3):
            engine.backward(engine(tokens(index)))
            engine.step()
            if evaluates:
                with torch.inference_mode():
                    engine(tokens(9))
        held.append(masters(engine))
        engine.close()
    assert all(torch.equal(value, held[1][name]) for name, value in held[0].items())


def test_forwards_that_are_never_followed_by_backward_do_not_pile_up(open_engine: Open, nvme_path: Any) -> None:
    limit = 30_000
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"stage3_max_live_parameters": limit}))
    for index in range(8):
        engine(tokens(index))
    micro_batch(engine, 0)
    assert engine.statistics().live_numel_peak <= limit
    assert_equal(engine, reference_after("gpt", engine, 1), "gpt")


# ---- tied, released, edited parameters ------------------------------------------------------------------------------


def test_tied_weights_are_one_parameter_with_two_names(open_engine: Open, nvme_path: Any) -> None:
    model: Any = build("tied")
    engine = open_engine(model, make_config(NVME, nvme_path))
    for index in range(6):
        micro_batch(engine, index)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(engine.full_parameter("head.weight"), engine.full_parameter("embedding.weight"))
    slots = [slot for unit in engine.units for slot in unit.slots if "embedding.weight" in slot.names]
    assert len(slots) == 1 and "head.weight" in slots[0].names
    assert_equal(engine, reference_after("tied", engine, 6), "tied")


def share_data(model: nn.Module) -> None:
    model[1].weight.data = model[0].weight.data


def share_by_a_new_parameter(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data.T)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("share", [share_data, share_by_a_new_parameter])
def test_two_parameters_in_one_memory_are_refused_unless_both_are_frozen(
    open_engine: Open, share: Callable[[nn.Module], None], stage: int
) -> None:
    """Torch trains them as one weight; as two they would come apart with the first step."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW"}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    share(model)
    with pytest.raises(ConfigError, match=r"parameter 1.weight: its memory is that of 0.weight"):
        open_engine(model, config)
    model[:2].requires_grad_(False)
    open_engine(model, config).close()


def test_a_released_parameter_keeps_its_face(open_engine: Open, nvme_path: Any) -> None:
    model: Any = build("gpt")
    parameter = model.blocks[0].up.weight
    engine = open_engine(model, make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    assert model.blocks[0].up.weight is parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shape == (128, 32) and parameter.numel() == 4096 and parameter.dim() == 2
    assert parameter.dtype is torch.bfloat16 and parameter.requires_grad and parameter.is_leaf
    assert parameter.detach().shape == (128, 32) and parameter.data.shape == (128, 32)
    assert set(model.state_dict()) == set(build("gpt").state_dict())
    assert "up.weight" in repr(dict(model.named_parameters()).keys())


@pytest.mark.parametrize(
    "arithmetic",
    [lambda p: p + 1, lambda p: p.sum(), lambda p: p @ torch.ones(32, 1, dtype=p.dtype), torch.norm],
    ids=["add", "sum", "matmul", "norm"],
)
def test_arithmetic_on_a_released_parameter_fetches_or_names_it_and_the_way_out(
    open_engine: Open, nvme_path: Any, arithmetic: Callable[[Tensor], Tensor]
) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    truth = arithmetic(engine.full_parameter("blocks.0.up.weight"))
    try:
        with torch.no_grad():
            result = arithmetic(model.blocks[0].up.weight)
    except (StateError, RuntimeError) as error:
        assert "blocks.0.up.weight" in str(error) and "GatheredParameters" in str(error)
    else:
        assert torch.equal(result, truth)


@pytest.mark.parametrize("pair", [NVME, ("cpu", "nvme"), ("nvme", "none"), ("none", "none")], ids="-".join)
@pytest.mark.parametrize("edit_after", [0, 3])
def test_edits_inside_gathered_parameters_are_kept(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], edit_after: int
) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(pair, nvme_path))
    reference = reference_of()
    for index in range(6):
        if index == edit_after:
            with zero.GatheredParameters([model.blocks[1].up.weight, model.head.weight], modifier_rank=0):
                whole = model.blocks[1].up.weight
                assert torch.equal(whole.detach(), reference.full_parameter("blocks.1.up.weight"))
                with torch.no_grad():
                    whole[3].fill_(0.25)
                    model.head.weight.mul_(0.5)
            edited = reference.full_parameter("blocks.1.up.weight")
            edited[3] = 0.25
            reference.edit("blocks.1.up.weight", edited)
            reference.edit("head.weight", reference.full_parameter("head.weight") * 0.5)
            assert torch.equal(engine.full_parameter("blocks.1.up.weight"), edited)
        micro_batch(engine, index)
        micro_batch(reference, index)
    assert_equal(engine, reference, "gpt")


def test_gathered_parameters_without_an_edit_change_nothing(open_engine: Open, nvme_path: Any) -> None:
    model: Any = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path))
    for index in range(4):
        micro_batch(engine, index)
        with zero.GatheredParameters(model.head.weight):
            assert model.head.weight.detach().float().abs().sum() > 0
    assert_equal(engine, reference_after("gpt", engine, 4), "gpt")


def test_named_full_parameters_lists_every_parameter_once(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(build("mixed"), make_config(NVME, nvme_path))
    micro_batch(engine, 0)
    listed = dict(engine.named_full_parameters())
    shapes = {name: p.shape for name, p in build("mixed").named_parameters()}
    assert {name: value.shape for name, value in listed.items()} == shapes
    for name, trainable in trainability(build("mixed")):
        whole = engine.full_master(name) if trainable and listed[name].dtype == torch.float32 else None
        whole = engine.full_parameter(name) if whole is None else whole
        assert torch.equal(listed[name].to(whole.dtype), whole), name


# ---- zero.Init ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "cpu"), ("nvme", "none")], ids="-".join)
@pytest.mark.parametrize("model", ["gpt", "tied", "odd_sizes"])
def test_a_model_built_under_init_trains_like_one_built_outside(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], model: str
) -> None:
    config = make_config(pair, nvme_path, clipping=0.3)
    with zero.Init(config_dict_or_path=config):
        built = build(model)
    engine = open_engine(built, config)
    for index in range(5):
        micro_batch(engine, index)
    assert_equal(engine, reference_after(model, engine, 5, clipping=0.3), model)


def test_a_block_frozen_after_init_stays_as_it_was_and_the_rest_trains(open_engine: Open, nvme_path: Any) -> None:
    config = make_config(NVME, nvme_path)
    with zero.Init(config_dict_or_path=config):
        built: Any = build("gpt")
    built.blocks[1].requires_grad_(False)
    engine = open_engine(built, config)
    first = {name: engine.full_parameter(name) for name, _ in trainability(built)}
    for index in range(4):
        micro_batch(engine, index)
    for name, value in first.items():
        moved = not torch.equal(engine.full_parameter(name), value)
        assert moved is not name.startswith("blocks.1."), name


def test_an_exception_inside_init_leaves_torch_as_it_was(nvme_path: Any) -> None:
    before = nn.Linear.__init__, nn.Module.__init__
    with pytest.raises(KeyError), zero.Init(config_dict_or_path=make_config(NVME, nvme_path)):
        nn.Linear(4, 4)
        raise KeyError("constructor")
    assert (nn.Linear.__init__, nn.Module.__init__) == before
    assert torch.equal(nn.LayerNorm(3).weight.detach(), torch.ones(3))


@pytest.mark.parametrize("more", [{"bf16": True}, {"bf16": False}, {"bf16": False, "fp16": {"enabled": True}}])
def test_a_trained_complex_parameter_is_refused_by_name(open_engine: Open, nvme_path: Any, more: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
    with pytest.raises(ConfigError, match=r"parameter phase: training torch\.complex64 weights is not available"):
        open_engine(model, make_config(NVME, nvme_path, **more))
