"""Muon and AdamW as one plain optimizer: torch's class over matrices, the reference's Adam over the rest."""

from __future__ import annotations

from typing import Any

import torch
from reference import Hyper, State, adam
from tiled_optimizers import Group

MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01}
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}
BLOCK = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3, "momentum": 0.95, "weight_decay": 0.01}}
"""The same, in a configuration."""


class MuonAndAdam(torch.optim.Optimizer):
    """A group's `use_muon` selects the rule; without it, the parameters' shapes do."""

    def __init__(self, groups: list[Group], muon: dict[str, Any] = MUON, adam: dict[str, Any] = ADAM) -> None:
        split = []
        for group in groups:
            for flag, options in ((True, muon), (False, adam)):
                chosen = [p for p in group["params"] if group.get("use_muon", p.dim() >= 2) == flag]
                if chosen:
                    split.append({**options, **group, "use_muon": flag, "params": chosen})
        super().__init__(split, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._muon if group["use_muon"] else self._adam)(parameter, group)

    def _muon(self, parameter: torch.nn.Parameter, group: Group) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        options = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
        wide = parameter.data.view(-1, *parameter.shape[-2:]), state["momentum_buffer"].view(-1, *parameter.shape[-2:])
        for matrix, momentum, grad in zip(*wide, parameter.grad.view(wide[0].shape), strict=True):
            held = torch.nn.Parameter(matrix.clone())
            held.grad = grad.clone()
            muon = torch.optim.Muon([held], **options)
            muon.state[held] = {"momentum_buffer": momentum}
            muon.step()
            matrix.copy_(held)

    def _adam(self, parameter: torch.nn.Parameter, group: Group) -> None:
        state = self.state[parameter]
        hyper = Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        zeros = torch.zeros_like(parameter)
        held = State(parameter.data, state.get("exp_avg", zeros), state.get("exp_avg_sq", zeros), state.get("step", 0))
        adam(held, parameter.grad, 1.0, hyper)
        parameter.copy_(held.master)
        state.update(exp_avg=held.exp_avg, exp_avg_sq=held.exp_avg_sq, step=held.step)
