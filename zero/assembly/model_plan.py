"""Make the plan of a model. This works on the meta device too, so that a model of any size can be planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from zero.config import Config
from zero.optim.make_rule import make_trained_parameters
from zero.optim.rules import AdamRule, Rules, TrainedParameters
from zero.params.layout import Layout, Placement, build_layout, make_placement
from zero.params.units import CoveredUnit, Leaf, collect_leaves, live_numels
from zero.plan.covering import cover_model
from zero.plan.machine import Machine
from zero.plan.plan import Plan
from zero.plan.planner import Planner
from zero.plan.sub_group_state import RuleStates


def lay_out(
    model: nn.Module,
    leaves: list[Leaf],
    trainable: Mapping[int, int],
    config: Config,
    placement: Placement,
    whole_rules: frozenset[int] = frozenset(),
) -> tuple[list[CoveredUnit], Layout]:
    """The units of a model, and the place of each parameter in the flat space.

    Raises ConfigError: a parameter's dtype cannot be trained; names it.

    Args:
        leaves: from `collect_leaves(model)`.
        trainable: id(parameter) of each parameter in the optimizer -> number of the rule that updates it.
        placement: which ranks share each unit.
        whole_rules: numbers of the rules that need whole parameters.
    """
    covered = cover_model(model, leaves, trainable, config, whole_rules)
    for unit in covered:
        if not placement.weights_sharded:
            unit.content = replace(unit.content, persistent=True)
        if not placement.is_single_rank:  # no single rows: other ranks would have to send them
            unit.content = replace(unit.content, expert_rows=0)
    contents = [unit.content for unit in covered]
    return covered, build_layout(contents, placement, bf16_masters=config.bf16_masters)


def make_planner(
    model: nn.Module,
    laid_out: tuple[list[CoveredUnit], Layout],
    config: Config,
    machine: Machine,
    device: torch.device,
    in_place: bool,
    placement: Placement,
    rules: Rules,
) -> Planner:
    """The planner that makes one rank's plan for a layout.

    Args:
        laid_out: from `lay_out`.
        machine: the available memory.
        in_place: units whose home memory the device can address are used there without a copy.
        placement: which ranks share each unit.
        rules: they determine the states of each parameter.
    """
    covered, layout = laid_out
    uses = live_numels(model, covered, layout)
    rule_states = RuleStates(rules.states, rules.largest_small_bytes(layout))
    return Planner(layout, config, machine, device, in_place, uses, placement, rule_states)


def plan_model(
    model: nn.Module,
    config: Config,
    machine: Machine,
    device: torch.device,
    world_size: int = 1,
    *,
    smallest: bool = False,
) -> tuple[Layout, Plan]:
    """The plan that `zero.initialize` would make for training all of a model that requires gradients.

    Raises ConfigError: an impossible setting or parameter; names it. Raises BudgetError: the plan does not fit; names
    the setting to change.

    Args:
        model: on any device; only its shapes and dtypes are read.
        machine: the memory that one rank can use.
        world_size: number of ranks; the plan is for the first rank.
        smallest: make the smallest plan for the model, even if the machine has less memory.
    """
    placement = make_placement(config, 0, world_size)
    trained = make_trained_parameters(None, None, model, config) or TrainedParameters([], Rules((AdamRule(),)))
    rules = trained.rules
    covered, layout = lay_out(
        model, collect_leaves(model), rules.numbers(trained.groups), config, placement, rules.whole_parameter_rules
    )
    planner = make_planner(model, (covered, layout), config, machine, device, True, placement, rules)
    return layout, planner.make_least() if smallest else planner.make_plan()
