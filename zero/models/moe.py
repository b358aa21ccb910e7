"""`MoE`: a layer of experts of which each token uses some, with DeepSpeed's arguments, results and parameter names.

All experts are on every rank. At ZeRO stage 3 each rank keeps a shard of each, and experts are fetched one after the
other from their tier, like other modules. Every expert is called in every forward, even with no token, so that all
ranks fetch the same units in the same order. Weights are fetched for the tokens. In DeepSpeed, `ep_size` sends tokens
to the ranks that hold the weights, which does not change the results; here it has no effect.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload.errors import ConfigError
from zero.assembly.log import NOTICE

# ---- moe routing ---------------------------------------------------------------------------------------------------
# Routing of tokens: each token's experts, their weights, and the tokens that are dropped. Pure functions on logits.
#
# [Source: DeepSpeed's top-1, top-2 and top-k gating, after GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961)] The
# rules are the same; but tokens are stored as indices, not as a mask of tokens x experts x positions.


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


logger = logging.getLogger("zero")

POLICIES = (None, "None", "Jitter", "RSample")
JITTER = 1e-2
"""Inputs of the gate are multiplied by random factors from 1 - JITTER to 1 + JITTER."""


class TopKGate(nn.Module):
    """Routes tokens to experts, in fp32."""

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in POLICIES:
            raise ConfigError(
                f"MoE: noisy_gate_policy: expected None, 'Jitter' or 'RSample', got {noisy_gate_policy!r}"
            )
        if not 1 <= k <= num_experts:
            raise ConfigError(f"MoE: k: expected 1 to num_experts ({num_experts}), got {k}")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.noisy_gate_policy, self.use_rts = k, noisy_gate_policy, use_rts
        self._sample_second = top2_2nd_expert_sampling
        factors = (capacity_factor, eval_capacity_factor) if drop_tokens else (None, None)
        self._capacities = {
            training: ExpertCapacity(factor, min_capacity)
            for training, factor in zip((True, False), factors, strict=True)
        }

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """`tokens`: (tokens, model_dim); `used_token`: the tokens to use (only with k = 1)."""
        noise = self.noisy_gate_policy if self.training else None
        inputs = tokens.float()
        if noise == "Jitter":
            inputs = inputs * torch.empty_like(inputs).uniform_(1 - JITTER, 1 + JITTER)
        logits, capacity = F.linear(inputs, self.wg.weight.float()), self._capacities[self.training]
        if self.k == 1:
            return top1(logits, capacity, used=used_token, noisy=noise == "RSample", at_random=self.use_rts)
        if self.k == 2:
            return top2(logits, capacity, samples_second=self._sample_second)
        return topk(logits, self.k, capacity)


class Experts(nn.Module):
    """Copies of one module."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for parameter in self.deepspeed_experts.parameters():
            # Scripts read these attributes when they make param groups.
            parameter.allreduce, parameter.group_name = False, expert_group_name  # type: ignore[attr-defined]


class MOELayer(nn.Module):
    """A gate and its experts. `l_aux`, `exp_counts`: of the last forward."""

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Input and output: (..., model_dim)."""
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = routing.balance_loss, routing.counts
        out = torch.zeros_like(tokens, dtype=torch.promote_types(tokens.dtype, routing.weights.dtype))
        for number, expert in enumerate(self.experts.deepspeed_experts):
            rows, choice = torch.where((routing.experts == number) & routing.has_capacity)
            result = expert(tokens[rows])
            if isinstance(result, tuple):
                result = result[0]  # the other item is a bias, which is not added
            out.index_add_(0, rows, result.to(out.dtype) * routing.weights[rows, choice].unsqueeze(1))
        return out.to(tokens.dtype).view(x.shape)


class MoE(nn.Module):
    """A layer of experts, of which each token uses `k`.

    Args:
        hidden_size: width of the input and the output.
        expert: a module from (tokens, hidden_size) to the same shape, or to a tuple that begins with it; it is copied.
        num_experts: number of copies.
        ep_size: number of ranks over which DeepSpeed distributes the experts; a divisor of `num_experts`. Here every
            rank has all experts (at ZeRO stage 3 a shard of each), with the same results.
        k: number of experts of a token.
        capacity_factor, eval_capacity_factor: an expert takes at most so many times its even share of the tokens, in
            training and in evaluation; further tokens are dropped by this expert.
        min_capacity: an expert takes at least so many tokens.
        use_residual: the expert itself also gets all tokens, and a learned coefficient mixes both results.
        noisy_gate_policy: in training: "Jitter" of the gate's input, or "RSample", Gumbel noise on its logits; or None.
        drop_tokens: False: experts take all their tokens.
        use_rts: the kept tokens are chosen at random (k = 1); False: the first ones are kept.
        use_tutel: accepted; there is only one implementation.
        enable_expert_tensor_parallelism: not available: must be False.
        top2_2nd_expert_sampling: the second of two experts is sampled.

    Raises ConfigError: an argument is out of range.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise ConfigError(f"MoE: ep_size: expected a divisor of num_experts ({num_experts}), got {ep_size}")
        if ep_size > 1:
            logger.log(
                NOTICE,
                "MoE: ep_size %d: experts are not distributed over ranks; at ZeRO stage 3 each rank keeps a part of "
                "every expert and fetches them one after the other, with the same results",
                ep_size,
            )
        if enable_expert_tensor_parallelism:
            raise ConfigError("MoE: enable_expert_tensor_parallelism: not available; set it to False")
        self.num_experts = self.num_local_experts = num_experts
        self.ep_size, self.use_residual, self.expert_group_name = ep_size, use_residual, f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, Experts(expert, num_experts, self.expert_group_name))
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Accepted, without effect: there are no groups of experts."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, (..., hidden_size), the balance loss (to add to the model's), and the tokens per expert.

        `used_token`: (tokens,), 0 for tokens that are sent to no expert; only with k = 1.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            residual = self.mlp(hidden_states)
            residual = residual[0] if isinstance(residual, tuple) else residual
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + residual * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
