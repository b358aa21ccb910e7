"""DeepSpeed's classes of what `initialize` returns second: ours is one class, so they are told by what it shows."""

from __future__ import annotations

from typing import Any

from zero.optim.optimizer import ZeroOptimizer


class _Shows(type):
    """`isinstance` asks for an attribute, not for ancestry."""

    shows: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and hasattr(instance, cls.shows)


class DeepSpeedZeroOptimizer(metaclass=_Shows):
    """The optimizer of stages 1 and 2: it shows the parts of the fp32 masters."""

    shows = "single_partition_of_fp32_groups"


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Shows):
    """The optimizer of stage 3: it shows the parts of the fp32 masters."""

    shows = "fp32_partitioned_groups_flat"
