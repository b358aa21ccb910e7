"""What `averaged_weights()` refuses while the weights are averages."""

from __future__ import annotations

from offload.errors import StateError
from zero.params.layout import SubGroup
from zero.values.unit_editor import EDIT

REFUSED_CALLS = {
    *("backward", "step", "optimizer.step", "replan"),
    *("save_checkpoint", "load_checkpoint", "save_snapshot", "load_snapshot"),
    *("optimizer.state_dict", "optimizer.load_state_dict", "optimizer.state", EDIT),
}
"""Calls that need the trained weights, or would replace masters or arrays that are swapped or put aside."""


class AveragesGuard:
    """The sub-groups that are averages now. It refuses calls that train, save or replace the weights meanwhile.

    Attributes:
        open_blocks: number of open `averaged_weights()` blocks, one inside the other.
        averaged_groups: sub-groups whose weights are averages.
        is_swapping: weights and averages are being swapped.
    """

    def __init__(self) -> None:
        self.open_blocks, self.is_swapping = 0, False
        self.averaged_groups: set[SubGroup] = set()

    def check_call(self, what: str) -> None:
        if what in REFUSED_CALLS:
            self._check(what)

    def check_rewrite(self) -> None:
        self._check("replacing weights")

    def _check(self, what: str) -> None:
        if (self.open_blocks or self.averaged_groups) and not self.is_swapping:
            raise StateError(
                f"{what}: inside engine.averaged_weights() the weights are averages; call it outside"
                + ("" if self.open_blocks else ". Leaving the block failed: enter and leave it once more")
            )
