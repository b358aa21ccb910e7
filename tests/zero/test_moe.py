"""Layers of experts route as DeepSpeed's formulas say, and train under an engine as in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import seeded
from ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F

import zero
from offload.errors import ConfigError
from zero.models.moe import ExpertCapacity, top1, top2, topk
from zero.moe import MoE

Open = Callable[..., Any]
TOKENS, EXPERTS, WIDTH = 40, 5, 16


# ---- routing, against masks of tokens x experts x places ---------------------------------------


def dense_top1(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(tokens, experts, places) weights and the loss, the first tokens staying."""
    gates = F.softmax(logits, dim=1)
    mask = F.one_hot(gates.argmax(1), EXPERTS)
    loss = (gates.mean(0) * mask.float().mean(0)).sum() * EXPERTS
    at = mask.cumsum(0) - 1
    mask = mask * (at < capacity)
    places = F.one_hot((at * mask).sum(1), TOKENS).float()
    return torch.einsum("se,sc->sec", gates * mask, places), loss


def dense_top2(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    gates = F.softmax(logits, dim=1)
    mask1 = F.one_hot(gates.argmax(1), EXPERTS)
    mask2 = F.one_hot(logits.masked_fill(mask1.bool(), -math.inf).argmax(1), EXPERTS)
    at1, at2 = mask1.cumsum(0) - 1, mask2.cumsum(0) - 1 + mask1.sum(0, keepdim=True)
    loss = (gates.mean(0) * mask1.float().mean(0)).mean() * EXPERTS * EXPERTS
    mask1, mask2 = mask1 * (at1 < capacity), mask2 * (at2 < capacity)
    share1, share2 = (gates * mask1).sum(1), (gates * mask2).sum(1)
    whole = (share1 + share2).clamp(min=torch.finfo(torch.float32).eps)
    combined = torch.zeros(TOKENS, EXPERTS, 2 * TOKENS)
    for share, mask, at in ((share1, mask1, at1), (share2, mask2, at2)):
        places = F.one_hot((at * mask).sum(1), 2 * TOKENS).float()
        combined = combined + torch.einsum("se,sc->sec", (share / whole).unsqueeze(1) * mask, places)
    return combined, loss


def logits_of() -> Tensor:
    with seeded(0):
        return torch.randn(TOKENS, EXPERTS) + torch.linspace(0, 2, EXPERTS)


def weights_of(routing: Any) -> Tensor:
    """(tokens, experts)."""
    return torch.zeros(TOKENS, EXPERTS).scatter_add_(1, routing.experts, routing.weights)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, None])
def test_one_expert_a_token_as_by_masks(factor: float | None) -> None:
    logits = logits_of()
    routing = top1(logits, ExpertCapacity(factor, 4), used=None, noisy=False, at_random=False)
    capacity = TOKENS if factor is None else max(math.ceil(TOKENS / EXPERTS * factor), 4)
    dense, loss = dense_top1(logits, capacity)
    torch.testing.assert_close(weights_of(routing), dense.sum(2), rtol=0, atol=0)
    assert torch.equal(routing.balance_loss, loss)
    assert int(routing.counts.sum()) == TOKENS


@pytest.mark.parametrize("factor", [0.25, 1.0, None])
def test_two_experts_a_token_as_by_masks(factor: float | None) -> None:
    logits = logits_of()
    routing = top2(logits, ExpertCapacity(factor, 4), samples_second=False)
    capacity = 2 * TOKENS if factor is None else max(math.ceil(TOKENS / EXPERTS * factor * 2), 4)
    dense, loss = dense_top2(logits, capacity)
    torch.testing.assert_close(weights_of(routing), dense.sum(2), rtol=1e-6, atol=1e-7)
    assert torch.equal(routing.balance_loss, loss)


def test_of_more_experts_the_most_probable_stay_and_weights_add_up_to_one() -> None:
    logits = logits_of()
    everything = topk(logits, 3, ExpertCapacity(None, 4))
    assert bool(everything.has_capacity.all())
    torch.testing.assert_close(everything.weights.sum(1), torch.ones(TOKENS))
    routing = topk(logits, 3, ExpertCapacity(0.5, 1))
    places = math.ceil(TOKENS / EXPERTS * 0.5 * 3)
    gates = F.softmax(logits, dim=1)
    for expert in range(EXPERTS):
        came = (routing.experts == expert).any(1)
        stayed = ((routing.experts == expert) & routing.has_capacity).any(1)
        assert int(stayed.sum()) == min(int(came.sum()), places)
        if bool((came & ~stayed).any()):
            assert gates[stayed, expert].min() >= gates[came & ~stayed, expert].max()
    sums = routing.weights.sum(1)
    torch.testing.assert_close(sums, (routing.has_capacity.any(1)).float())


def test_a_draw_decides_who_stays_and_noise_whom_a_token_goes_to() -> None:
    logits = torch.zeros(TOKENS, EXPERTS)
    logits[:, 0] = 9.0
    room = ExpertCapacity(1.0, 1)
    stayed = [top1(logits, room, used=None, noisy=False, at_random=True).has_capacity[:, 0] for _ in range(2)]
    assert [int(kept.sum()) for kept in stayed] == [TOKENS // EXPERTS] * 2
    assert not torch.equal(*stayed)
    chosen = top1(torch.zeros(TOKENS, EXPERTS), room, used=None, noisy=True, at_random=False).experts
    assert len(chosen.unique()) > 1
    seconds = top2(torch.zeros(TOKENS, EXPERTS), room, samples_second=True).experts[:, 1]
    assert len(seconds.unique()) > 1


def test_unused_tokens_go_to_no_expert() -> None:
    used = torch.arange(TOKENS) % 2
    routing = top1(logits_of(), ExpertCapacity(None, 1), used=used, noisy=False, at_random=False)
    assert torch.equal(routing.has_capacity[:, 0], used.bool())
    assert int(routing.counts.sum()) == int(used.sum())


# ---- the layer ---------------------------------------------------------------------------------


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Model(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, Expert(), num_experts=4, **arguments)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, loss, _ = self.moe(self.first(x))
        return self.last(hidden).square().mean() + 0.01 * loss


LAYERS: dict[str, dict[str, Any]] = {
    "top-1": {"use_rts": False},
    "top-2": {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.6},
    "top-3, residual": {"k": 3, "use_residual": True, "drop_tokens": False},
}


def made(layer: str, **more: Any) -> tuple[Model, list[Tensor]]:
    with seeded(0):
        return Model(**LAYERS[layer], **more), [torch.randn(2, 12, WIDTH) for _ in range(4)]


def test_every_token_gets_the_sum_of_its_experts() -> None:
    with seeded(0):
        layer = MoE(WIDTH, Expert(), num_experts=4, k=3, drop_tokens=False).eval()
        x = torch.randn(2, 6, WIDTH)
    output, _, counts = layer(x)
    tokens = x.view(-1, WIDTH)
    gates = F.softmax(layer.deepspeed_moe.gate.wg(tokens), dim=1)
    best = gates.topk(3, dim=1)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    expected = torch.stack(
        [
            sum((w / weights.sum()) * experts[int(e)](token) for w, e in zip(weights, chosen, strict=True))
            for token, weights, chosen in zip(tokens, best.values, best.indices, strict=True)
        ]
    )
    torch.testing.assert_close(output.view(-1, WIDTH), expected)
    assert int(counts.sum()) == 3 * len(tokens)


def plain_losses(layer: str, batches: list[Tensor], model: Model) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for batch in batches:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def engine_losses(layer: str, stage: int, tier: str, path: str, ranks: int = 1) -> list[float]:
    where = {"device": tier} | ({"nvme_path": path} if tier == "nvme" else {})
    model, batches = made(layer)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            **({"offload_param": where} if stage == 3 else {}),
            **({"offload_optimizer": dict(where)} if stage else {}),
            "stage3_param_persistence_threshold": 0,
            "shared_host_memory": False,
        },
    }
    losses = []
    with zero.initialize(model=model, config=config)[0] as engine:
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (2, "nvme"), (3, "cpu"), (3, "nvme")])
def test_an_engine_trains_it_as_plain_torch(layer: str, stage: int, tier: str, nvme_path: Any) -> None:
    model, batches = made(layer)
    wanted = plain_losses(layer, batches, model)
    assert engine_losses(layer, stage, tier, str(nvme_path)) == pytest.approx(wanted, rel=1e-5)


def losses_of_rank(stage: int, path: str, ep_size: int) -> list[float]:
    """Each rank has batches of its own: an expert may get tokens on one rank and none on the other."""
    rank = torch.distributed.get_rank()
    model, batches = made("top-1", ep_size=ep_size)
    batches = [batch[:1, : 4 + 8 * rank] for batch in batches]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "shared_host_memory": False,
            **({"offload_param": {"device": "nvme", "nvme_path": path}} if stage == 3 else {}),
        },
    }
    losses = []
    with zero.initialize(model=model, config=config)[0] as engine:
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("stage", "ep_size"), [(1, 1), (3, 1), (3, 2)])
def test_two_ranks_train_as_plain_torch_on_the_mean_of_their_losses(
    rank_pool: Callable[[int], RankPool], stage: int, ep_size: int, nvme_path: Any
) -> None:
    model, batches = made("top-1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    wanted: list[list[float]] = [[], []]
    for batch in batches:
        optimizer.zero_grad()
        for rank in range(2):
            loss = model(batch[:1, : 4 + 8 * rank])
            (loss / 2).backward()
            wanted[rank].append(float(loss.detach()))
        optimizer.step()
    found = rank_pool(2).run(losses_of_rank, stage, str(nvme_path), ep_size)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ep_size": 3}, r"ep_size: expected a divisor of num_experts \(4\), got 3"),
        ({"ep_size": 0}, "ep_size"),
        ({"noisy_gate_policy": "Noise"}, "noisy_gate_policy"),
        ({"k": 5}, "k: expected 1 to num_experts"),
        ({"enable_expert_tensor_parallelism": True}, "tensor_parallelism"),
    ],
)
def test_what_cannot_be_is_refused_with_the_argument(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Model(**arguments)


def test_fewer_tokens_than_an_expert_takes_at_least_say_what_to_set() -> None:
    with pytest.raises(ConfigError, match="min_capacity"):
        Model(min_capacity=8)(torch.ones(1, 3, WIDTH))


def test_names_and_marks_are_those_of_deepspeed() -> None:
    model = Model(use_residual=True)
    names = {name for name, _ in model.named_parameters()}
    assert {"moe.deepspeed_moe.gate.wg.weight", "moe.mlp.0.weight", "moe.coefficient.weight"} <= names
    assert "moe.deepspeed_moe.experts.deepspeed_experts.3.2.bias" in names
    marked = {name for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    assert marked == {name for name in names if ".deepspeed_experts." in name}
    noisy = Model(noisy_gate_policy="Jitter").train()
    assert not torch.equal(*[noisy(torch.ones(2, 12, WIDTH)) for _ in range(2)])


def test_places_are_those_that_fp32_gives() -> None:
    """25 x 1.2 is a little more than 30 there, and DeepSpeed rounds up."""
    room, counts = ExpertCapacity(1.2, 1), torch.zeros(8)
    assert [room.per_expert(200, 8, k, counts) for k in (1, 2)] == [31, 61]
    assert ExpertCapacity(1.25, 4).per_expert(64, 8, 1, counts) == 10


def test_outputs_of_experts_are_weighed_and_added_up_in_fp32() -> None:
    with seeded(0):
        layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, k=3, drop_tokens=False).bfloat16().eval()
        x = torch.randn(TOKENS, WIDTH).bfloat16()
    found = layer(x)[0]
    moe = layer.deepspeed_moe
    routing = moe.gate(x, None)
    wanted = torch.zeros(TOKENS, WIDTH)
    for number, expert in enumerate(moe.experts.deepspeed_experts):
        rows, choice = torch.where((routing.experts == number) & routing.has_capacity)
        wanted.index_add_(0, rows, expert(x[rows]).float() * routing.weights[rows, choice].unsqueeze(1))
    assert torch.equal(found, wanted.bfloat16())
