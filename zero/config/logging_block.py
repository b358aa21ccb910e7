"""What a run reports: monitors, the profiler of operations, and the log of collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zero.config.fields import ConfigBlock, Flag, Inert, InertFlag, InertNumber, Integer, Text, Word, reads
from zero.config.numbers import parse_integer, parse_number


class TensorBoard(ConfigBlock):
    """`tensorboard`: event files in `output_path`/`job_name`. Needs the package tensorboard."""

    enabled: Flag = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class CsvMonitor(ConfigBlock):
    """`csv_monitor`: a file for each tag in `output_path`/`job_name`."""

    enabled: Flag = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class Wandb(ConfigBlock):
    """`wandb`: needs the package wandb."""

    enabled: Flag = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class Comet(ConfigBlock):
    """`comet`: needs the package comet_ml. What is left out comes from Comet's own settings."""

    enabled: Flag = False
    samples_log_interval: Annotated[Integer, Field(ge=1)] = 100
    """Samples from one value of a tag to the next."""
    project: Text | None = None
    workspace: Text | None = None
    api_key: Text | None = None
    experiment_name: Text | None = None
    experiment_key: Text | None = None
    online: Flag | None = None
    mode: Word[Literal["get", "create", "get_or_create"]] | None = None


def _parse_depth(value: object) -> int:
    if parse_number(value) == -1:
        return -1
    return parse_integer(value)


class FlopsProfiler(ConfigBlock):
    """`flops_profiler`: operations, parameters and time of each module, in one forward of one step."""

    is_open = True

    enabled: Flag = False
    profile_step: Annotated[Integer, Field(ge=1)] = 1
    """The step whose first forward is measured, counted from 1."""
    module_depth: Annotated[int, reads(_parse_depth)] = -1
    """Modules down to this depth are listed; -1: all."""
    top_modules: Annotated[Integer, Field(ge=1)] = 1
    """So many classes are named at each depth."""
    detailed: Flag = True
    """The table of modules; false: only the sums."""
    output_file: Text | None = None
    """None: the log."""
    recompute_fwd_factor: Annotated[
        InertNumber, Inert("operations are always counted as they run, including those of recomputation")
    ] = None


def _parse_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


class CommsLogger(ConfigBlock):
    """`comms_logger`: what collectives have moved."""

    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: Annotated[tuple[str, ...], reads(_parse_names)] = ()
    """With prof_all false: only these, such as "gather" and "reduce"."""
    verbose: Flag = False
    """A line after every step."""
    debug: Annotated[InertFlag, Inert("collectives are counted by purpose, not by caller")] = None
