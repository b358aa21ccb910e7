"""Mixtures of experts: what is not routed to does not move, neither weights nor states, and the numbers are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import reference_of
from models import TOKENS, VOCAB, make_config, next_token_loss, seeded, tokens, trainability
from reference import differences, snapshot
from torch import Tensor, nn

Open = Callable[..., Any]
WIDTH, HIDDEN, LAYERS, EXPERTS = 32, 64, 2, 64
LIMITS = {"stage3_max_live_parameters": 80_000, "stage3_prefetch_bucket_size": 40_000}


class Expert(nn.Module):
    """8,192 elements with its bias-free Linears: two pages of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Two experts for each token, or two for the whole batch; as the models of transformers did with ModuleLists."""

    def __init__(self, experts: int, whole_batch: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.whole_batch = whole_batch

    def forward(self, x: Tensor, offset: int) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.gate(flat).softmax(-1)
        if self.whole_batch:
            scores = scores.roll(offset, -1).mean(0, keepdim=True).expand_as(scores)
        weights, chosen = scores.topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index in chosen.unique().tolist():
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.experts[index](flat[rows]) * weights[rows, place, None])
        return x + out.view_as(x)


class Layer(nn.Module):
    def __init__(self, experts: int, whole_batch: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(experts, whole_batch)

    def forward(self, x: Tensor, offset: int) -> Tensor:
        return self.mixture(x + self.mix(x), offset)


class MoE(nn.Module):
    """`offset` turns the routing, so that each batch has experts of its own."""

    def __init__(self, experts: int = EXPERTS, whole_batch: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(experts, whole_batch) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, offset)
        return next_token_loss(self.head(x), tokens)


def moe(**sizes: Any) -> MoE:
    with seeded(0):
        return MoE(**sizes)


class Watched:
    """Counts calls of experts: what a run really used."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, int] = {}
        for name, module in model.named_modules():
            if isinstance(module, Expert):
                module.register_forward_pre_hook(lambda module, args, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def train(trainer: Any, steps: int) -> None:
    for index in range(steps):
        trainer.backward(trainer(tokens(index), 7 * index))
        trainer.step()


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("whole_batch", [True, False], ids=["two experts a batch", "two experts a token"])
def test_bytes_follow_the_experts_used(open_engine: Open, nvme_path: Any, device: str, whole_batch: bool) -> None:
    steps = 10
    model = moe(whole_batch=whole_batch)
    watched = Watched(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS))
    train(engine, steps)
    nbytes = {unit.name: unit.nbytes for unit in engine.units}
    experts = {name for name in nbytes if ".experts." in name}
    assert experts >= set(watched.calls) and len(experts) == LAYERS * EXPERTS
    others = sum(nbytes[name] for name in set(nbytes) - experts)
    used = sum(nbytes[name] * count for name, count in watched.calls.items())
    fetched = engine.statistics().gathered_bytes
    # Forward and backward; a unit that is kept between them is fetched once.
    assert (used + others * steps) <= fetched <= 1.1 * 2 * (used + others * steps)
    if whole_batch:
        assert sum(watched.calls.values()) == 2 * LAYERS * steps
        assert fetched < 0.2 * steps * sum(nbytes.values()), "all experts would have been many times that"


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_mixture_trains_to_the_bits_of_a_run_without_the_engine(
    open_engine: Open, nvme_path: Any, device: str
) -> None:
    model = moe(experts=8, whole_batch=False)
    names = trainability(model)
    engine = open_engine(model, make_config((device, device), nvme_path, zero=LIMITS, clipping=0.3))
    train(engine, 6)
    reference = reference_of(moe(experts=8, whole_batch=False), clipping=0.3)
    train(reference, 6)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []


def test_states_of_experts_without_a_gradient_stay_where_they_are(open_engine: Open, nvme_path: Any) -> None:
    """torch skips a parameter without a gradient: its record is neither read nor written, its step is not counted."""
    model = moe()
    watched = Watched(model)
    engine = open_engine(model, make_config(("nvme", "nvme"), nvme_path, zero=LIMITS))
    adopted = engine.statistics().nvme_write_bytes
    steps = 6
    train(engine, steps)
    engine.synchronize()
    others = sum(unit.numel for unit in engine.units if ".experts." not in unit.name)
    numel = {unit.name: unit.numel for unit in engine.units}
    trained = sum(numel[name] * count for name, count in watched.calls.items()) + others * steps
    assert engine.statistics().nvme_write_bytes - adopted == trained * (2 + 10)  # the weight; remainder and two moments
    idle = next(unit for unit in engine.units if ".experts." in unit.name and unit.name not in watched.calls)
    state = engine.full_state(idle.slots[0].name)
    assert state["step"] == 0 and not state["exp_avg"].any()


def test_what_comes_after_the_experts_is_foretold_whichever_they_were(open_engine: Open, nvme_path: Any) -> None:
    """Only the experts themselves are missed; the same two every time are no surprise after a while."""
    engine = open_engine(moe(), make_config(("nvme", "nvme"), nvme_path, zero=LIMITS))
    train(engine, 12)
    before = engine.statistics()
    train(engine, 12)
    after = engine.statistics()
    assert after.prefetch_misses - before.prefetch_misses <= 12 * 2 * LAYERS
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0  # the same batch is routed to the same experts from here on
    for _ in range(30):
        engine.backward(engine(tokens(0), 0))
        engine.step()
    before = engine.statistics()
    for _ in range(5):
        engine.backward(engine(tokens(0), 0))
        engine.step()
    assert engine.statistics().prefetch_misses == before.prefetch_misses
