"""`autotuning`: how `zero run --autotuning` tries configurations by short runs of the user's own script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import (
    ConfigBlock,
    Flag,
    Inert,
    InertCount,
    InertFlag,
    InertInteger,
    InertNumber,
    InertText,
    Integer,
    Text,
    Word,
    problem,
    reads,
)


def _parse_mappings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise ValueError(
            "an object from configuration keys to arguments of the script, such as --per_device_train_batch_size"
        )
    return {key.strip(): argument.strip() for key, argument in value.items()}


class ModelInfo(ConfigBlock):
    """What DeepSpeed's tuner foretells runs from."""

    is_open = True

    why = "the memory plan is made from the model itself when a run starts"

    profile: InertFlag = None
    num_params: InertCount = None
    hidden_size: InertInteger = None
    num_layers: InertInteger = None


class Autotuning(ConfigBlock):
    """`autotuning`: of `zero run --autotuning tune|run SCRIPT`, see launching."""

    is_open = True

    why = (
        "the tuner tries a few placements of weights and optimizer states, and doubles the micro-batch while that "
        "is faster"
    )

    enabled: Annotated[Flag | None, Inert("the launcher's --autotuning decides")] = None
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
    max_train_batch_size: Annotated[
        InertInteger,
        Inert("the tuner changes only the micro-batch, not gradient accumulation; limit the micro-batch instead"),
    ] = None
    min_train_batch_size: Annotated[
        InertInteger,
        Inert("the tuner changes only the micro-batch, not gradient accumulation; limit the micro-batch instead"),
    ] = None
    fast: InertFlag = None
    tuner_type: InertText = None
    tuner_early_stopping: InertInteger = None
    tuner_num_trials: InertNumber = None
    mp_size: Annotated[InertInteger, Inert("tensor parallelism is not available")] = None
    model_info_path: Annotated[InertText, Inert(ModelInfo.why)] = None
    model_info: ModelInfo | None = None

    @model_validator(mode="after")
    def _check_profile_steps(self) -> Self:
        if self.end_profile_step <= self.start_profile_step:
            raise problem(
                f"a step after start_profile_step, which is {self.start_profile_step}",
                at="end_profile_step",
                keys=("start_profile_step", "end_profile_step"),
            )
        return self
