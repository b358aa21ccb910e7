"""The depth of a plan: how much is on the device at once, from the least possible to all spare memory.

[Note: the rule] The planner tries one depth after the other, deepest first, and takes the first plan that fits.

1. *Deep*: four neighbouring units are gathered (one in use, one or two prefetched, one kept), with room for one more,
   so that holes between blocks of unequal size block nothing. There are two flat gradients, so that one is moved away
   while the next is made. With `memory_budget.device` what remains of the budget is used for gathered units. Without it
   this is done on a GPU as long as these pools stay within a fifth of the free memory; on a CPU, device memory is host
   memory and is not used for this.
2. *Lean*: three neighbours, two gradients. Without a budget it is the deepest if deep takes more than that fifth.
3. *Short*: two neighbours, one gradient. Like lean it takes at most half of the free memory: the other half is for
   activations, and for the gradients that autograd makes.
4. *Least*: the units of one call, one gradient, no prefetching. It takes as much as it needs.

Additional gathered elements are used to keep units from their forward to their backward, a quarter of them to prefetch.
A depth changes speed and memory, never the layout and never a result.

[Note: neighbours] They are units that modules use one after the other, in model order; the units of one module, such as
a frozen base and its adapters, count together. Each count includes the parameters in use around it, of a module whose
children are being called. With `stage3_max_live_parameters` nothing fills spare memory: that many elements are
gathered at most, but never fewer than one call uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero.params.units import LiveNumels

FREE_SHARE = 0.2
"""Part of a device's free memory that a plan without a budget may fill; what remains is for activations."""


POOL_SHARE = 0.5
"""Part of it for pools if memory is short; only the least depth, the need of one call, may take more."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Memory on the device for units and gradients that do not live there."""

    live_numel: int
    """Elements gathered at a time, including units of enclosing modules."""
    slack_numel: int
    """Additional room, because of holes."""
    gradients: int
    """Flat gradients of the largest unit."""

    def add_live(self, numel: int) -> Depth:
        """The depth with `numel` more gathered elements."""
        return replace(self, live_numel=self.live_numel + numel)

    def limit_to(self, live_numel_max: int | None) -> Depth:
        """The depth with at most `live_numel_max` gathered elements."""
        return self if live_numel_max is None else replace(self, live_numel=min(self.live_numel, live_numel_max))


def depths(uses: LiveNumels, largest_numel: int) -> tuple[Depth, Depth, Depth, Depth]:
    """Deep, lean, short and least.

    Args:
        uses: uses of the model's units that are fetched and evicted.
        largest_numel: elements of the largest of these units.
    """
    around = uses.enclosing_max
    # A block that stays in the middle of the pool leaves two holes: any unit must fit into the larger one.
    hole = largest_numel if around else 0

    def neighbours(count: int) -> int:
        return max(_largest_window(uses.per_module, count) + around, uses.peak)

    return (
        Depth(neighbours(4), largest_numel, 2),
        Depth(neighbours(3), hole, 2),
        Depth(neighbours(2), hole, 1),
        Depth(uses.peak, hole, 1),
    )


def _largest_window(numels: Sequence[int], count: int) -> int:
    return max((sum(numels[i : i + count]) for i in range(len(numels))), default=0)
