"""Averages of the weights: the rule that keeps them during updates, and the state they are made from.

[Note: two kinds] With `ema_decay` any rule is wrapped in a rule that keeps an exponential moving average of the fp32
masters as one more array state, `ema`. The average begins with the weights before a parameter's first update, and every
update of the parameter moves it. `AdamWScheduleFree` keeps no average: the weights and `z` determine it.

[Note: one pass] A run is updated in pieces that stay in the cache. Each piece's average is moved before the next piece
is updated, so the masters are not read from memory again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError
from offload.kernels import masters, tile_threads
from zero.config import Config
from zero.ops.schedule_free import AdamWScheduleFree, averaging_factor
from zero.optim.rules import Progress, Rule, Rules, Scalar, TiledRule, UpdateRun, for_each_tile
from zero.optim.small_states import Shapes, SmallTensors
from zero.plan.sub_group_state import States

EMA, OF_SCHEDULE_FREE = "ema", "z"


class EmaValues(NamedTuple):
    """Values of one parameter in one step."""

    inner: Any
    first: bool  # The average begins with this update.


class EmaRule(Rule):
    """A rule that also keeps an average of the weights.

    `inner`: the rule that updates the weights; `decay`: the share of the old average that remains after an update.
    """

    def __init__(self, inner: Rule, decay: float) -> None:
        self.inner, self._new_share = inner, 1 - decay
        self.name, self.needs_whole_parameters = inner.name, inner.needs_whole_parameters
        self.states: tuple[str, ...] = (*inner.states, EMA)
        self.defaults: Mapping[str, Any] = inner.defaults
        self.scalars: Mapping[str, Scalar] = inner.scalars
        self.fills: Mapping[str, float] = inner.fills
        self.small = inner.small

    def small_shapes(self, shape: tuple[int, ...]) -> Shapes:
        return self.inner.small_shapes(shape)

    def on_step_begin(self) -> None:
        self.inner.on_step_begin()

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> EmaValues:
        """The values that the inner rule has fixed, and whether the average begins now."""
        first = count == 1 or progress is None or EMA not in progress.present
        if progress is not None:
            progress = replace(progress, present=tuple(name for name in progress.present if name != EMA))
        return EmaValues(self.inner.values(group, count, progress), first)

    def after_update(self, values: EmaValues) -> tuple[Progress, Mapping[str, Any]]:
        """As the inner rule, and the average is present from now on."""
        progress, changed = self.inner.after_update(values.inner)
        progress = progress or Progress((), self.inner.states)
        return replace(progress, present=(*progress.present, EMA)), changed

    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> Sequence[SmallTensors] | None:
        """Update piece by piece: first the weights, then their average."""
        small = None
        for piece in [run] if self.needs_whole_parameters else _pieces(run):
            *tensors, average = piece.states.tensors
            for begin, end, values in piece.segments:
                if values.first:
                    masters.join(average[begin:end], *_weight_and_master(piece, slice(begin, end)))
            segments = [(begin, end, values.inner) for begin, end, values in piece.segments]
            inner = piece._replace(states=States(tuple(tensors)), segments=segments)
            # Only whole parameters have small states, and then there is one piece.
            small = self.inner.update_run(inner, grad_scale, threads)
            self._move_average(piece, average, threads)
        return small

    def _move_average(self, run: UpdateRun, average: torch.Tensor, threads: int) -> None:
        """Bit-equal to `torch.optim.swa_utils.get_ema_multi_avg_fn`."""

        def move(at: slice, values: EmaValues) -> None:
            weight, stored = _weight_and_master(run, at)
            if stored is not None:
                narrow, weight = weight, torch.empty_like(weight, dtype=torch.float32)
                masters.join(weight, narrow, stored)
            average[at].lerp_(weight, self._new_share)

        for_each_tile(run, move, threads)


def _weight_and_master(run: UpdateRun, at: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run.weight[at], None if run.master is None else run.master[at]


def _pieces(run: UpdateRun) -> Iterator[UpdateRun]:
    """The run in pieces if it is on the host; on a GPU it is one piece, since its update is one call anyway."""
    numel, piece_numel = run.weight.numel(), tile_threads.WORTH_THREADS_NUMEL
    if run.weight.device.type != "cpu" or numel <= piece_numel:
        yield run
        return
    for lo in range(0, numel, piece_numel):
        hi = min(lo + piece_numel, numel)
        segments = ((max(begin, lo) - lo, min(end, hi) - lo, values) for begin, end, values in run.segments)
        yield UpdateRun(
            *_weight_and_master(run, slice(lo, hi)),
            run.states.part(lo, hi),
            run.gradient[lo:hi],
            [segment for segment in segments if segment[0] < segment[1]],
        )


def inner_rule(rule: Rule) -> Rule:
    """The rule that updates the weights."""
    return rule.inner if isinstance(rule, EmaRule) else rule


def with_averages(rules: Rules, config: Config) -> Rules:
    """The rules, with an average of the weights if the configuration asks for one.

    Raises ConfigError: states or masters are not fp32, or the rule keeps an average already.
    """
    if config.ema_decay is None:
        return rules
    state_dtype = config.zero_optimization.offload_optimizer.state_dtype
    if state_dtype != "fp32":
        raise ConfigError(
            "ema_decay: averages are kept in fp32, but zero_optimization.offload_optimizer.state_dtype is "
            f"{state_dtype}; set it to fp32, or leave ema_decay out"
        )
    if config.bf16_masters:
        raise ConfigError(
            "ema_decay: averages are made from fp32 master weights, and with bf16.bf16_master_weights_and_grads there "
            "are none; set it to false, or leave ema_decay out"
        )
    if any(average_state(rule) for rule in rules.each):
        raise ConfigError(
            f"ema_decay: {rules.names} already averages the weights (engine.averaged_weights() shows them); leave "
            "ema_decay out"
        )
    return replace(rules, each=tuple(EmaRule(rule, config.ema_decay) for rule in rules.each))


def average_state(rule: Rule) -> str | None:
    """The name of the state from which averages are computed; None: there are none."""
    if isinstance(rule, EmaRule):
        return EMA
    is_schedule_free = isinstance(rule, TiledRule) and issubclass(rule.kind, AdamWScheduleFree)
    return OF_SCHEDULE_FREE if is_schedule_free else None


def average_share(rule: Rule, group: Mapping[str, Any]) -> float:
    """The state's share in the average, lerp(weights, state, share): 1 if the state is the average."""
    return 1.0 if isinstance(rule, EmaRule) else averaging_factor(float(group["betas"][0]))
