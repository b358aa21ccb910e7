"""What an engine does about checkpoints, snapshots and weights for others."""

from __future__ import annotations

from zero.checkpoint.load import LoadsCheckpoints
from zero.checkpoint.weights_out import SavesWeights
from zero.snapshots.taking import TakesSnapshots


class Checkpoints(LoadsCheckpoints, SavesWeights, TakesSnapshots):
    """Mixed into the engine."""

    def weights_change(self, index: int) -> None:
        """A unit's weights change by other means than a step.

        A checkpoint that is being written takes the old ones first; a snapshot of them is void. An error of the
        checkpoint waits for the next call: here it would take the place of the change.
        """
        self.settle_checkpoint()
        self.note_change(index)
        self.forget_frozen()
        self._weights_changed()
