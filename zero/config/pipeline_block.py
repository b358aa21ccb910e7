"""`pipeline`: how the stages of a PipelineModule take turns."""

from __future__ import annotations

from typing import ClassVar, Literal

from zero.config.fields import ConfigBlock, InertAny, InertFlag, InertText, InertWhole


class Pipeline(ConfigBlock):
    """Of a `zero.pipe.PipelineModule`; other models do not read it."""

    why: ClassVar[str] = "the arguments of PipelineModule say it; what crosses between stages is sent whole"

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of micro-batches on a stage: "1f1b" keeps at most as many of them as there are stages ahead; "gpipe" runs
    all forwards first."""
    stages: InertAny = None
    partition: InertText = None
    seed_layers: InertFlag = None
    activation_checkpoint_interval: InertWhole = None
    pipe_partitioned: InertFlag = None
    grad_partitioned: InertFlag = None
    use_reentrant: InertFlag = None
