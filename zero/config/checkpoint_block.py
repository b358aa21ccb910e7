"""The `checkpoint` block: how checkpoints are written, and how many are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zero.config import features
from zero.config.fields import Block, Flag, Inert, Only, Whole, choice

Validation = Literal["ignore", "warn", "fail"]
Frozen = Literal["always", "once", "reference"]


class CheckpointConfig(Block):
    """`checkpoint`."""

    tag_validation: Annotated[Validation, choice("ignore", "warn", "fail")] = "warn"
    """What happens when ranks save under different tags. With "ignore" and "warn" the first rank's counts."""
    async_save: Flag = False
    """Ours: training goes on while a checkpoint is written."""
    keep_last: Annotated[Whole, Field(ge=1)] | None = None
    """Ours: after a save older checkpoints in the folder are removed but so many; None: none is."""
    frozen: Annotated[Frozen, choice("always", "once", "reference")] = "always"
    """Ours: whether weights that are not trained are in every checkpoint, in a file for all of them, or not at all."""
    load_universal: Annotated[Flag | None, Inert("every checkpoint loads at any stage, tier and number of ranks")] = (
        None
    )
    use_node_local_storage: Annotated[
        Flag, Only((False,), "a checkpoint is one folder that all nodes see; set it to false")
    ] = False
    parallel_write: features.parallel_write | None = None
    checkpoint_serialization: Annotated[Flag | None, Inert("there is one format, whatever this says")] = None
    writer: features.writer | None = None
