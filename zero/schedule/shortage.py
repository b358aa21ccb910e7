"""What to say when something does not fit under the live limit."""

from __future__ import annotations

from collections.abc import Iterable

from offload.errors import BudgetError
from zero.params.layout import Unit


def no_room(what: str, numel: int, in_use: Iterable[Unit], lent_numel: int, live_numel_max: int) -> BudgetError:
    """The error.

    Args:
        what: is needed.
        numel: its elements.
        in_use: units that cannot go.
        lent_numel: elements of experts' rows that cannot go.
        live_numel_max: the limit.
    """
    names = [f"{unit.name} ({unit.numel:,})" for unit in in_use]
    names += [f"rows of experts ({lent_numel:,})"] if lent_numel else []
    return BudgetError(
        f"{what} ({numel:,} elements) is needed while {', '.join(names) or 'nothing'} is in use: together more than "
        f"{live_numel_max:,} live elements; raise zero_optimization.stage3_max_live_parameters or memory_budget.device"
    )
