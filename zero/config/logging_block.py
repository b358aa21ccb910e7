"""What a run measures: monitors, the profiler of operations, the log of collectives, and `autotuning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import ConfigBlock, Flag, Integer, Text, Word, problem, reads
from zero.config.inactive_keys import inactive_keys
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

    rows = inactive_keys("flops_profiler")
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


def _parse_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


class CommsLogger(ConfigBlock):
    """`comms_logger`: what collectives have moved."""

    rows = inactive_keys("comms_logger")

    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: Annotated[tuple[str, ...], reads(_parse_names)] = ()
    """With prof_all false: only these, such as "gather" and "reduce"."""
    verbose: Flag = False
    """A line after every step."""


def _parse_mappings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise ValueError(
            "an object from configuration keys to arguments of the script, such as --per_device_train_batch_size"
        )
    return {key.strip(): argument.strip() for key, argument in value.items()}


class Autotuning(ConfigBlock):
    """`autotuning`: of `zero run --autotuning tune|run SCRIPT`, see launching."""

    rows = inactive_keys("autotuning")
    is_open = True

    results_dir: Text = "autotuning_results"
    """Folder of ds_config_optimal.json, the best configuration."""
    exps_dir: Text = "autotuning_exps"
    """Folder with a folder for each run: its configuration, its output, what it measured."""
    overwrite: Flag = True
    """False: a run that is in exps_dir with the same configuration is not repeated."""
    start_profile_step: Annotated[Integer, Field(ge=1)] = 3
    """Steps are timed from the end of this one, counted from 1."""
    end_profile_step: Annotated[Integer, Field(ge=2)] = 5
    """After this step the script of a run ends."""
    metric: Word[Literal["throughput", "latency", "flops"]] = "throughput"
    """What is best: samples a second (which "flops" is too), or the seconds of a step, with the micro-batch as it
    is."""
    metric_path: Text | None = None
    """Set by the launcher for a run: the file for what it measured. An engine that finds it here ends the script."""
    arg_mappings: Annotated[dict[str, str], reads(_parse_mappings)] | None = None
    """Key of the configuration -> argument of the script that has to say the same."""
    min_train_micro_batch_size_per_gpu: Annotated[Integer, Field(ge=1)] | None = None
    """The first that is tried; None: the configuration's, or 1."""
    max_train_micro_batch_size_per_gpu: Annotated[Integer, Field(ge=1)] | None = None
    """None: 64."""
    num_tuning_micro_batch_sizes: Annotated[Integer, Field(ge=1)] | None = None
    """So many are tried at most, each twice the one before; 1: it stays as it is."""

    @model_validator(mode="after")
    def _check_profile_steps(self) -> Self:
        if self.end_profile_step <= self.start_profile_step:
            raise problem(
                f"a step after start_profile_step, which is {self.start_profile_step}",
                at="end_profile_step",
                keys=("start_profile_step", "end_profile_step"),
            )
        return self
