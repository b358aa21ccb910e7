"""The `scheduler` block: DeepSpeed's five schedules, and any of torch's by the name of its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from torch.optim import lr_scheduler
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Integer, Number, Text, Word, problem, reads, short_json
from zero.config.known_keys import nearest
from zero.config.numbers import parse_number
from zero.lr_schedules import SCHEDULES

_TORCHS = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != "LRScheduler"}
# Name in small letters -> class.
KINDS: dict[str, type[Any]] = {name.lower(): kind for name, kind in (_TORCHS | SCHEDULES).items()}

NOT_BY_NAME = {
    "ReduceLROnPlateau": "it needs a metric at each step; make it yourself over the optimizer that initialize returns, "
    "and call its step(metric)",
    "SequentialLR": "it is made of other schedulers; pass the object to initialize as lr_scheduler",
    "ChainedScheduler": "it is made of other schedulers; pass the object to initialize as lr_scheduler",
}


def _parse_per_group(value: object) -> float | tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        return parse_number(value)
    return tuple(parse_number(item) for item in value)


def _parse_iteration(value: object) -> int:
    number = parse_number(value)
    if number != int(number) or number < -1:
        raise ValueError("a whole number of at least -1")
    return int(number)


PerGroup = Annotated[float | tuple[float, ...] | None, reads(_parse_per_group)]  # One number, or one a param group.
Steps = Annotated[Integer, Field(ge=1)]


class SchedulerParams(ConfigBlock):
    """`scheduler.params`: what the class takes besides the optimizer. What is left out is the default of the class."""

    warmup_min_lr: PerGroup = None
    warmup_max_lr: PerGroup = None
    """"auto" (and, in WarmupLR, no value): the learning rate of the optimizer."""
    warmup_num_steps: Annotated[Integer, Field(ge=0)] | None = None
    """0 and 1 count as 2; DeepSpeed refuses 0."""
    warmup_type: Word[Literal["log", "linear"]] | None = None
    warmup_min_ratio: Number | None = None
    cos_min_ratio: Number | None = None
    total_num_steps: Steps | None = None
    last_batch_iteration: Annotated[int | None, reads(_parse_iteration)] = None
    lr_range_test_min_lr: PerGroup = None
    lr_range_test_step_rate: Number | None = None
    lr_range_test_step_size: Steps | None = None
    lr_range_test_staircase: Flag | None = None
    cycle_first_step_size: Annotated[Number, Field(gt=0)] | None = None
    cycle_first_stair_count: Integer | None = None
    cycle_second_step_size: Annotated[Number, Field(ge=0)] | None = None
    cycle_second_stair_count: Integer | None = None
    decay_step_size: Annotated[Number, Field(ge=0)] | None = None
    cycle_min_lr: PerGroup = None
    cycle_max_lr: PerGroup = None
    decay_lr_rate: Number | None = None
    cycle_momentum: Flag | None = None
    cycle_min_mom: PerGroup = None
    cycle_max_mom: PerGroup = None
    decay_mom_rate: Number | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        return self  # `SchedulerConfig` knows the class, and with it the keys.

    @property
    def user_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value is not None}


DECLARED_KEYS = frozenset(SchedulerParams.model_fields)


class SchedulerConfig(ConfigBlock):
    """`scheduler`: made over the engine's optimizer, and stepped by the engine. Without a type it asks for nothing."""

    is_open = True

    type: Text | None = None
    params: SchedulerParams = SchedulerParams()

    @property
    def kind(self) -> Callable[..., Any] | None:
        return None if self.type is None else KINDS.get(self.type.lower())

    @classmethod
    def extra_keys(cls, key: str, raw: Mapping[Any, Any]) -> Collection[str]:
        """In `params`: what the class takes that the type names."""
        kind = KINDS.get(str(raw.get("type")).lower())
        if key != "params" or kind is None:
            return ()
        return [name for name in constructor_parameters(kind) if name not in DECLARED_KEYS]

    @model_validator(mode="after")
    def _check_constructible(self) -> Self:
        if self.type is None:
            return self
        if self.kind is None:
            near = nearest(self.type, KINDS)
            hint = f"the nearest is {KINDS[near[0]].__name__}; " if near else ""
            raise problem(
                f"one of {', '.join(SCHEDULES)}, or a class of torch.optim.lr_scheduler",
                at="type",
                got=short_json(self.type),
                fix=f"{hint}or pass an object or a callable to initialize as lr_scheduler",
            )
        name = self.kind.__name__
        if name in NOT_BY_NAME:
            expected = "a scheduler that can be made from numbers"
            raise problem(expected, at="type", got=short_json(self.type), fix=NOT_BY_NAME[name])
        parameters, options = constructor_parameters(self.kind), self.params.user_options
        if foreign := [_name_owners(key) for key in options if key not in parameters]:
            raise problem(f"keys of {name} ({', '.join(parameters)})", at="params", got=", ".join(foreign))
        return self


def constructor_parameters(kind: Callable[..., Any]) -> dict[str, bool]:
    """What a class takes besides the optimizer: name -> whether it must be given."""
    signature = inspect.signature(kind).parameters
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in signature.items()
        if name not in ("optimizer", "verbose")
    }


def _name_owners(key: str) -> str:
    owners = [kind.__name__ for kind in SCHEDULES.values() if key in constructor_parameters(kind)]
    return f'"{key}" (of {", ".join(owners)})'
