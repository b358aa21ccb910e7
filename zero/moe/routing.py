"""Routing of tokens: each token's experts, their weights, and the tokens that are dropped. Pure functions on logits.

[Source: DeepSpeed's top-1, top-2 and top-k gating, after GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961)] The
rules are the same; but tokens are stored as indices, not as a mask of tokens x experts x positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from offload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of tokens to experts, with `k` choices for each token.

    Attributes:
        experts: (tokens, k), int64.
        weights: (tokens, k) fp32, factors of the experts' outputs; 0 if the expert has no capacity left.
        has_capacity: (tokens, k), bool: the expert has capacity left.
        balance_loss: scalar, large if few experts get most tokens.
        counts: (experts,), number of tokens that have chosen each expert.
    """

    experts: Tensor
    weights: Tensor
    has_capacity: Tensor
    balance_loss: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class ExpertCapacity:
    """The capacity of an expert: `factor` times its even share of tokens, at least `minimum`; None: no limit."""

    factor: float | None
    minimum: int

    def per_expert(self, tokens: int, experts: int, k: int, counts: Tensor) -> int:
        if self.factor is None:
            return int(counts.max())
        # In fp32, as in DeepSpeed: rounded up, the result may differ from the one in doubles.
        share = torch.tensor(self.factor * k, dtype=torch.float32, device="cpu") * (tokens / experts)
        return max(math.ceil(float(share)), self.minimum)


def top1(logits: Tensor, capacity: ExpertCapacity, *, used: Tensor | None, noisy: bool, at_random: bool) -> Routing:
    """One expert for each token, weighted by its probability.

    Args:
        logits: (tokens, experts), fp32.
        capacity: capacity of each expert.
        used: (tokens,), 0 for tokens that are sent to no expert; None: all are sent.
        noisy: add Gumbel noise before an expert is chosen.
        at_random: if an expert has no capacity for all, choose its tokens at random; else the first ones.

    Raises ConfigError: there are fewer tokens than the least capacity of an expert.
    """
    tokens, experts = logits.shape
    if tokens < capacity.minimum:
        raise ConfigError(
            f"MoE: expected at least min_capacity ({capacity.minimum}) tokens, got {tokens}; set min_capacity to 0, or "
            "pass more tokens at once"
        )
    gates = F.softmax(logits, dim=1)
    chosen = torch.argmax(logits + gumbel_like(logits) if noisy else gates, dim=1)
    mask = F.one_hot(chosen, experts)
    if used is not None:
        mask = mask * used.reshape(-1, 1).to(mask.dtype)
    counts = mask.sum(0).detach()
    loss = (gates.mean(0) * mask.float().mean(0)).sum() * experts
    priority = torch.rand_like(gates) if at_random else torch.arange(tokens, 0, -1, device=gates.device).unsqueeze(1)
    has_capacity = top_tokens(mask * priority.detach(), mask.bool(), capacity.per_expert(tokens, experts, 1, counts))
    weights = gates.gather(1, chosen.unsqueeze(1))
    has_capacity = has_capacity.gather(1, chosen.unsqueeze(1))
    return Routing(chosen.unsqueeze(1), weights * has_capacity, has_capacity, loss, counts)


def top2(logits: Tensor, capacity: ExpertCapacity, *, samples_second: bool) -> Routing:
    """Two experts for each token, weighted by their probabilities, scaled to a sum of 1 over the experts with capacity.

    `samples_second`: the second expert is sampled with Gumbel noise; else it is the second most probable.
    """
    tokens, experts = logits.shape
    gates = F.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    mask1 = F.one_hot(first, experts)
    noisy = logits + gumbel_like(logits) if samples_second else logits
    second = torch.argmax(noisy.masked_fill(mask1.bool(), float("-inf")), dim=1)
    mask2 = F.one_hot(second, experts)
    loss = (gates.mean(0) * mask1.float().mean(0)).mean() * experts * experts
    counts = (mask1 + mask2).sum(0).detach()
    capacity_tokens = capacity.per_expert(tokens, experts, 2, counts)
    # All first choices are placed before any second choice.
    position1 = (mask1.cumsum(0) - 1).gather(1, first.unsqueeze(1))
    position2 = (mask2.cumsum(0) - 1 + mask1.sum(0)).gather(1, second.unsqueeze(1))
    has_capacity = torch.cat((position1, position2), 1) < capacity_tokens
    chosen = torch.stack((first, second), 1)
    return Routing(chosen, normalize(gates.gather(1, chosen) * has_capacity), has_capacity, loss, counts)


def topk(logits: Tensor, k: int, capacity: ExpertCapacity) -> Routing:
    """The k most probable experts of each token; an expert without capacity for all takes its most probable tokens."""
    tokens, experts = logits.shape
    gates = F.softmax(logits, dim=1)
    chosen = torch.topk(gates, k, dim=1).indices
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(0).detach()
    loss = (gates.mean(0) * mask.float().mean(0)).mean() * experts * experts / k
    capacity_tokens = capacity.per_expert(tokens, experts, k, counts)
    has_capacity = top_tokens((gates * mask).detach(), mask, capacity_tokens).gather(1, chosen)
    return Routing(chosen, normalize(gates.gather(1, chosen) * has_capacity), has_capacity, loss, counts)


def top_tokens(priority: Tensor, mask: Tensor, count: int) -> Tensor:
    """(tokens, experts): the mask, restricted to the `count` tokens of each expert with the largest `priority`."""
    best = torch.topk(priority, min(count, len(priority)), dim=0).indices
    return mask & torch.zeros_like(mask).scatter_(0, best, True)


def normalize(weights: Tensor) -> Tensor:
    """(tokens, k), scaled so that each token's sum is 1; a token whose weights are all 0 keeps them."""
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def gumbel_like(logits: Tensor) -> Tensor:
    """Noise that, added to logits, makes their argmax a sample by the probabilities."""
    return -torch.empty_like(logits).exponential_().log()
