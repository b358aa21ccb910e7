"""From a model to its plan, as the engine makes it; on the meta device too, so that any model can be planned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from zero.config import Config
from zero.optim.make_rule import rule_of_config
from zero.params.layout import Layout, build_layout
from zero.params.placement import Placement, place
from zero.params.units import CoveredUnit, Leaf, collect_leaves, uses_of
from zero.plan.covering import cover_model
from zero.plan.machine import Machine
from zero.plan.plan import Plan
from zero.plan.planner import Planner
from zero.plan.record import ADAM_STATES


def lay_out(
    model: nn.Module, leaves: list[Leaf], trainable: set[int], config: Config, placement: Placement
) -> tuple[list[CoveredUnit], Layout]:
    """The units of a model, and where each parameter lies in the flat space.

    Raises ConfigError: a parameter's dtype cannot be trained; names it.

    Args:
        leaves: from `collect_leaves(model)`.
        trainable: id(parameter) of those the optimizer holds.
        placement: who shares each unit.
    """
    covered = cover_model(model, leaves, trainable, config)
    for unit in covered:
        if not placement.weights_sharded:
            unit.content = replace(unit.content, persistent=True)
        if not placement.alone:  # rows would have to be asked for from whoever has them
            unit.content = replace(unit.content, expert_rows=0)
    return covered, build_layout([unit.content for unit in covered], placement)


def planner_of(
    model: nn.Module,
    laid_out: tuple[list[CoveredUnit], Layout],
    config: Config,
    machine: Machine,
    device: torch.device,
    in_place: bool,
    placement: Placement,
    states: tuple[str, ...],
) -> Planner:
    """Who makes one rank's plan for a layout.

    Args:
        laid_out: from `lay_out`.
        machine: what can be had.
        in_place: units whose home memory the device can address are used there without a copy.
        placement: who shares each unit.
        states: names of the optimizer's state planes.
    """
    covered, layout = laid_out
    uses = uses_of(model, covered, layout)
    return Planner(layout, config, machine, device, in_place, uses, placement, states)


def plan_model(
    model: nn.Module,
    config: Config,
    machine: Machine,
    device: torch.device,
    world_size: int = 1,
    *,
    least: bool = False,
) -> tuple[Layout, Plan]:
    """The plan that `zero.initialize` would make for training all of a model that requires gradients.

    Raises ConfigError: a knob or a parameter that cannot be; names it. Raises BudgetError: it does not fit; names the
    knob to turn.

    Args:
        model: on any device; nothing of it is read but shapes and dtypes.
        machine: what one rank can have.
        world_size: number of ranks; the plan is that of the first.
        least: what the model takes at least, whether or not the machine has it.
    """
    trainable = {id(p) for p in model.parameters() if p.requires_grad} if config.optimizer is not None else set()
    placement = place(config, 0, world_size)
    rule = rule_of_config(config)
    covered, layout = lay_out(model, collect_leaves(model), trainable, config, placement)
    states = ADAM_STATES if rule is None else rule.states
    planner = planner_of(model, (covered, layout), config, machine, device, True, placement, states)
    return layout, planner.make_least() if least else planner.make()
