"""Weights that several stages share: made equal at the beginning, and updated with the sum of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from zero.dist.comm import Group
from zero.models.pipeline_module import PipelineModule
from zero.store.pipeline_collectives import PipelineCollectives
from zero.values.parameter_values import ParameterValues


class TiedWeights:
    """The tied layers of one stage. All ranks make it together."""

    def __init__(self, module: PipelineModule, stages: PipelineCollectives) -> None:
        self._module, self._stages = module, stages
        self._groups = {key: stages.group(who) for key, who in module.tied_stages.items() if len(who) > 1}

    def make_equal(self) -> None:
        """Copy the values of the first stage that has them to the others. Called before the engine is made."""
        for group, _, parameter in self._shared_parameters():
            values = self._stages.all_gather(group, parameter.detach().cpu().reshape(-1))
            with torch.no_grad():
                parameter.copy_(values[0].view(parameter.shape))

    def sum_gradients(self, values_of: Callable[[nn.Parameter], ParameterValues]) -> None:
        """Give each stage the sum of all stages' gradients, added in the order of the stages. Called before a step.

        `values_of`: gives access to a parameter's values.
        """
        self._stages.begin_step()
        for group, _, parameter in self._shared_parameters():
            if not parameter.requires_grad:
                continue
            values = values_of(parameter)
            own = values.gradient()
            has_gradient = self._stages.all_gather(group, torch.tensor([own is not None], device="cpu").to(torch.uint8))
            if not any(bool(part) for part in has_gradient):
                continue
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu") if own is None else own.reshape(-1)
            total, *others = self._stages.all_gather(group, flat)
            for part in others:
                total = total + part
            values.set_gradient(total.view(parameter.shape))
            if group.index:
                # The gradient is stored rounded, and this stage's sum of squares contains the stored values: exclude
                # exactly these, since the first stage counts them.
                stored_gradient = values.gradient()
                self._stages.add_duplicate_gradient(
                    total if stored_gradient is None else stored_gradient.reshape(-1).contiguous()
                )

    def _shared_parameters(self) -> Iterator[tuple[Group, str, nn.Parameter]]:
        for key, group in self._groups.items():
            if group.size > 1:
                yield from ((group, name, parameter) for name, parameter in self._module.tied_parameters(key))
