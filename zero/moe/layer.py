"""`MoE`: a layer of experts of which each token uses some, with DeepSpeed's arguments, results and parameter names.

All experts are on every rank. At ZeRO stage 3 each rank keeps a shard of each, and experts are fetched one after the
other from their tier, like other modules. Every expert is called in every forward, even with no token, so that all
ranks fetch the same units in the same order. Weights are fetched for the tokens. In DeepSpeed, `ep_size` sends tokens
to the ranks that hold the weights, which does not change the results; here it has no effect.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload.errors import ConfigError
from zero.moe.routing import ExpertCapacity, Routing, top1, top2, topk
from zero.reports.log import NOTICE

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
