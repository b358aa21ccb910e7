"""How much is on the device at once: from what a model takes at least to what a device has to spare.

[Note: the rule] A plan is tried with one depth after the other, deepest first, and the first that fits is taken.

1. *Deep*: four neighbours gathered (one in use, one or two ahead, one kept) and room for one more, so that holes
   between blocks of unequal size stop nothing; two flat gradients, so that one leaves while the next is made. With
   `memory_budget.device` the rest of the budget goes to gathered units. Without one a GPU's does as far as this keeps
   the whole plan within a fifth of its free memory; a CPU's device memory is the host's and is not spent so.
2. *Lean*: three neighbours, two gradients. It is the deepest without a budget where deep is more than that fifth.
3. *Short*: two neighbours, one gradient. Like lean it takes no more than half of what is free: the rest is for
   activations, and for gradients as autograd makes them.
4. *Least*: what one call holds, one gradient. Nothing is read ahead. It takes what it needs.

More gathered elements are spent on keeping units from their forward to their backward, and a quarter of them on
reading ahead. A depth changes speed and memory, never the layout and never a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero.params.units import Uses

FREE_SHARE = 0.2
"""Part of a device's free memory that a plan without a budget fills on purpose; the rest is for activations."""


PASSING_SHARE = 0.5
"""Part of it that passes through a device which has no room for more; only what one call needs may be more."""


@dataclass(frozen=True, slots=True)
class Depth:
    """What is set aside on the device for what passes through it."""

    live_numel: int
    """Elements gathered at a time, units around others included."""
    slack_numel: int
    """More room for them, against holes."""
    gradients: int
    """Flat gradients of the largest unit."""

    def deeper(self, numel: int) -> Depth:
        """With so many more gathered."""
        return replace(self, live_numel=self.live_numel + numel)

    def within(self, live_numel_max: int | None) -> Depth:
        """With no more gathered than that."""
        return self if live_numel_max is None else replace(self, live_numel=min(self.live_numel, live_numel_max))


def depths(uses: Uses, largest_numel: int) -> tuple[Depth, Depth, Depth, Depth]:
    """Deep, lean, short and least.

    Args:
        uses: of the model's units that come and go.
        largest_numel: elements of the largest of them.
    """
    around = uses.around_max
    # A block that stays amid the pool while others come and go leaves two holes: the larger has to do for any unit.
    hole = largest_numel if around else 0

    def neighbours(count: int) -> int:
        return max(_largest_window(uses.together, count) + around, uses.most)

    return (
        Depth(neighbours(4), largest_numel, 2),
        Depth(neighbours(3), hole, 2),
        Depth(neighbours(2), hole, 1),
        Depth(uses.most, hole, 1),
    )


def _largest_window(numels: Sequence[int], count: int) -> int:
    return max((sum(numels[i : i + count]) for i in range(len(numels))), default=0)
