"""The `checkpoint` block: how checkpoints are written, and how many are kept."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zero.config.fields import Block, Flag, Inert, InertAny, InertFlag, InertNumber, InertText, Only, Whole, choice

Validation = Literal["ignore", "warn", "fail"]
Frozen = Literal["always", "once", "reference"]


class ParallelWrite(Block):
    """`checkpoint.parallel_write`."""

    why: ClassVar[str] = "there are no pipeline stages to share the writing"

    pipeline_stage: InertFlag = None


class CheckpointWriter(Block):
    """`checkpoint.writer`."""

    why: ClassVar[str] = "checkpoints are written by this engine, whose buffers follow from the plan"

    type: InertText = None
    io_buffer_size: InertAny = None
    io_buffer_double: InertFlag = None
    io_multiplier: InertNumber = None
    show_statistics: InertFlag = None
    data_parallel: InertText = None
    decoupled: InertFlag = None


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
    parallel_write: ParallelWrite | None = None
    checkpoint_serialization: Annotated[Flag | None, Inert("there is one format, whatever this says")] = None
    writer: CheckpointWriter | None = None
