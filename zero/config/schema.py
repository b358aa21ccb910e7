"""The whole configuration, as typed and frozen blocks; what does nothing is in `zero.config.inactive_keys`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from typing_extensions import Self

from offload.errors import ConfigError
from zero.config import logging_block as logs
from zero.config.batch import MICRO, STEPS, TRAIN, resolve_batch
from zero.config.elasticity import Elasticity, elastic_sizes
from zero.config.fields import ConfigBlock, Flag, Integer, Number, Word, problem, reads, world_size_of
from zero.config.forward_block import CurriculumLearning, HybridEngine, Pipeline, ProgressiveLayerDrop
from zero.config.inactive_keys import inactive_keys
from zero.config.known_keys import explain_unknown_key, keys_on_path
from zero.config.machine_block import ActivationCheckpointing, AioConfig, CheckpointConfig, MemoryBudget
from zero.config.numbers import parse_integer
from zero.config.optimizer_block import OptimizerConfig
from zero.config.precision_block import DTYPES, Bf16Config, DataTypes, Fp16Config, TorchAutocast
from zero.config.quantization_block import WeightQuantization
from zero.config.scheduler_block import SchedulerConfig
from zero.config.zero_block import ZeroConfig

Origin = Literal["user", "default", "auto"]


def _parse_print_interval(value: object) -> int | None:
    if value == math.inf or (isinstance(value, str) and value.lower() in ("inf", "infinity")):
        return None
    interval = parse_integer(value)
    if interval < 1:
        raise ValueError("at least 1, or Infinity for never")
    return interval


VERSION = 1  # Of the defaults; tests/zero/config/test_versions.py keeps them from changing.


def _parse_version(value: object) -> int:
    known = " or ".join(str(version) for version in range(1, VERSION + 1))
    try:
        version = parse_integer(value)
    except ValueError:
        version = 0
    if not 1 <= version <= VERSION:
        raise problem(
            f"{known}, the versions this release knows",
            fix="remove it to use the newest defaults, or update zero-infinity",
        )
    return version


@dataclass(frozen=True)
class AutoValue:
    """A value for a key that was "auto"."""

    value: Any
    source: str  # What it follows from.


@dataclass(frozen=True)
class Report:
    """What is learnt while a configuration is read, and stays as it is then; paths are dotted."""

    world_size: int = 1
    ranks_per_node: int | None = None
    source: Mapping[str, Any] = field(default_factory=dict)  # A copy of the configuration as the user gave it.
    # Canonical path to "user" or "auto"; a path that is missing was not given.
    origins: dict[str, Origin] = field(default_factory=dict)
    inactive: list[str] = field(default_factory=list)
    # Why a path of `inactive` does nothing; a path that is missing is overruled by other keys.
    reasons: dict[str, str] = field(default_factory=dict)
    deprecated: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # Lines about unknown keys that were tolerated.
    # Canonical path of an "auto" -> what was chosen.
    auto_values: Mapping[str, AutoValue] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)  # Top-level keys with other defaults than ours.


def plain(value: object) -> object:
    """The same of dicts, lists and single values only."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


_CommDtype = Word[Literal["fp32", "fp16", "bf16"]]


class Config(ConfigBlock):
    """A checked and resolved configuration. Made by `load_config`; every key below may appear in the JSON."""

    rows = inactive_keys("")
    is_open = True

    aliases: ClassVar[Mapping[str, str]] = {
        "bfloat16": "bf16",
        "pld": "progressive_layer_drop",
        "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
        "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    }

    config_version: Annotated[int, reads(_parse_version)] = VERSION
    """Ours: the defaults are those of this version, also after a release that changes them."""
    train_batch_size: Annotated[Integer, Field(ge=1)] = 1
    """Samples of one step: train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. Any two give the
    third; one gives the others with one accumulation step."""
    train_micro_batch_size_per_gpu: Annotated[Integer, Field(ge=1)] = 1
    """Samples of one forward on one rank."""
    gradient_accumulation_steps: Annotated[Integer, Field(ge=1)] = 1
    """Micro-batches of one step."""
    vertical_accumulation: Flag = False
    """Ours: `engine.train_batch` runs all micro-batches of a step unit by unit: a unit's weights come once in forward
    and once in backward, not once for each micro-batch. The activations of all of them are kept at the same time."""
    gradient_clipping: Annotated[Number, Field(ge=0)] = 0.0
    """Largest global gradient norm; 0.0 is off."""
    ema_decay: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """Ours: keep an exponential moving average of the fp32 weights beside the optimizer's states: after each update
    ema = ema_decay * ema + (1 - ema_decay) * weight. `engine.averaged_weights()` shows it; None: there is none."""
    steps_per_print: Annotated[int | None, reads(_parse_print_interval)] = None
    """None (and Infinity in the JSON): never."""
    dataloader_drop_last: Flag = False
    """The loader of training_data drops what does not fill a batch on every rank."""
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: ZeroConfig = ZeroConfig.model_validate({})
    aio: AioConfig = AioConfig()
    memory_budget: MemoryBudget = MemoryBudget()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    checkpoint: CheckpointConfig = CheckpointConfig()

    communication_data_type: _CommDtype | None = None
    """What gradients travel in between ranks; None: what they are in. "fp32" says of 16-bit gradients that they are
    summed in fp32, for which they need not be widened."""
    reduce_scatter_with_fp32_accumulation: Flag = False
    """Ours, named as Megatron's: 16-bit gradients are exchanged by all-to-all and summed in fp32, in rank order. On the
    CPU that is always so."""
    prescale_gradients: Flag = False
    """Gradients are divided by the number of ranks before they travel instead of after their sum."""
    gradient_predivide_factor: Annotated[Number, Field(gt=0)] = 1.0
    """Gradients are divided by it before they travel, and by the rest of the number of ranks after their sum."""
    gradient_allreduce_op: Word[Literal["mean", "sum"]] = "mean"
    """"sum": the gradients of all ranks are added up and not divided by their number."""
    managed_gradient_accumulation: Flag = True
    """False: each step() of the engine updates, however many backwards came before it."""
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    elasticity: Elasticity | None = None
    curriculum_learning: CurriculumLearning | None = None
    weight_quantization: WeightQuantization | None = None
    progressive_layer_drop: ProgressiveLayerDrop | None = None

    wall_clock_breakdown: Flag = False
    """Log the times of forward, backward, step and waiting after each step."""
    memory_breakdown: Flag = False
    """Log what memory is held after each step."""
    dump_state: Flag = False
    """Log the configuration in effect, and where each value comes from, at the start."""
    log_level: Word[Literal["debug", "info", "warning", "error", "critical"]] | None = None
    """What the logger "zero" shows, "info" the plan and the dtypes too; None: notices, and of other ranks errors."""
    comms_logger: logs.CommsLogger | None = None
    tensorboard: logs.TensorBoard | None = None
    wandb: logs.Wandb | None = None
    csv_monitor: logs.CsvMonitor | None = None
    comet: logs.Comet | None = None
    flops_profiler: logs.FlopsProfiler | None = None
    autotuning: logs.Autotuning | None = None
    pipeline: Pipeline | None = None
    hybrid_engine: HybridEngine | None = None

    _report: Report = PrivateAttr(default_factory=Report)

    @property
    def world_size(self) -> int:
        """Number of ranks the batch sizes were resolved for."""
        return self._report.world_size

    @property
    def source(self) -> Mapping[str, Any]:
        """A copy of the configuration as it was given."""
        return self._report.source

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What weights are kept and computed in; None: as the model has them."""
        return torch.bfloat16 if self.bf16.enabled else torch.float16 if self.fp16.enabled else None

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """What floating buffers become; None: they keep their dtype."""
        name = self.data_types.buffer_dtype
        return None if name is None or self.compute_dtype is None else DTYPES[name]

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """What several contributions to a gradient are added up in."""
        dtype = DTYPES[self.data_types.grad_accum_dtype or ("bf16" if self.bf16_masters else "fp32")]
        return dtype if dtype == self.compute_dtype else torch.float32

    @property
    def bf16_masters(self) -> bool:
        """Whether trained weights in bf16 have no fp32 masters."""
        return self.bf16.enabled and self.bf16.bf16_master_weights_and_grads

    @property
    def sums_16_bit_in_fp32(self) -> bool:
        """Whether 16-bit gradients are to be summed in fp32 on every backend."""
        is_requested = self.communication_data_type == "fp32" and self.compute_dtype is not None
        return is_requested or self.reduce_scatter_with_fp32_accumulation

    @property
    def inactive(self) -> tuple[str, ...]:
        """Dotted paths, as the user wrote them, that are known but do nothing here. The engine lists them once."""
        return tuple(self._report.inactive)

    @property
    def inactive_with_reasons(self) -> tuple[str, ...]:
        """As `inactive`, "path, path (why)": those with one reason together."""
        paths_by_reason: dict[str, list[str]] = {}
        for path in self.inactive:
            reason = self._report.reasons.get(path, "the values of other keys leave it without effect")
            paths_by_reason.setdefault(reason, []).append(path)
        return tuple(f"{', '.join(paths)} ({reason})" for reason, paths in paths_by_reason.items())

    @property
    def deprecated(self) -> tuple[str, ...]:
        """One line "path: what to use instead" for every deprecated key in use."""
        return tuple(self._report.deprecated)

    @property
    def ignored(self) -> tuple[str, ...]:
        """One line "key: nearest known key" for every unknown key that was tolerated."""
        return tuple(self._report.ignored)

    @property
    def auto_values(self) -> Mapping[str, AutoValue]:
        """Canonical path to what was chosen for a key that was "auto", from the model or the data."""
        return self._report.auto_values

    def origin(self, path: str) -> Origin:
        """Where the value of a key comes from.

        Args:
            path: dotted path, such as "zero_optimization.sub_group_size"; DeepSpeed's other spellings work too.

        Returns:
            "user"; "auto" if the key or a block around it was "auto"; "default" otherwise, also for derived values.

        Raises:
            ConfigError: there is no such key.
        """
        # What a class of torch takes is known only where it was given.
        canonical = path if path in self._report.origins else self._canonical(path)
        if canonical in self._report.origins:
            return self._report.origins[canonical]
        while "." in canonical:
            canonical = canonical.rpartition(".")[0]
            if self._report.origins.get(canonical) == "auto":
                return "auto"
        return "default"

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Canonical path to "user" or "auto" of every key that was given; what is missing is a default."""
        return self._report.origins

    def as_dict(self) -> dict[str, Any]:
        """The effective configuration with every default, as plain dicts and lists; a new one each time."""
        effective = plain(self.model_dump())
        return dict(effective) if isinstance(effective, dict) else {}

    def with_batch(self, sizes: Mapping[str, int]) -> Self:
        """This configuration with other batch sizes, which agree with each other."""
        return self.model_copy(update=dict(sizes))

    @classmethod
    def _canonical(cls, path: str) -> str:
        parts = path.split(".")
        keys = keys_on_path(parts, cls)
        if len(keys) < len(parts):
            block = keys[-1].inner if keys else cls
            wrong = parts[len(keys)]
            hint = (
                "it holds a value and has no keys below it"
                if block is None
                else explain_unknown_key(wrong, block=block, root=cls)
            )
            raise ConfigError(f"{path}: {'.'.join([*(key.name for key in keys), wrong])}: {hint}")
        return keys[-1].path

    @model_validator(mode="after")
    def _check_across_ranks(self, info: ValidationInfo) -> Self:
        world_size = world_size_of(info)
        resolve_batch(self._user_batch_sizes(world_size), world_size)
        if world_size > 1 and self.communication_data_type == "fp16" and self.bf16.enabled:
            raise problem(
                '"fp32" or "bf16"',
                fix="the range of fp16 is too small for bf16 gradients; remove the key",
                at="communication_data_type",
                got=f'"fp16" with {world_size} ranks and bf16.enabled',
                keys=("communication_data_type",),
            )
        divided = self.prescale_gradients or self.gradient_predivide_factor != 1.0
        if self.gradient_allreduce_op == "sum" and divided:
            raise problem(
                '"mean" together with prescale_gradients or gradient_predivide_factor',
                fix="those keys say when gradients are divided, and a sum is not divided; remove one of them",
                at="gradient_allreduce_op",
                got='"sum"',
                keys=("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"),
            )
        return self

    @model_validator(mode="after")
    def _check_one_precision(self) -> Self:
        if self.bf16.enabled and self.fp16.enabled:
            raise problem(
                "one of bf16 and fp16", fix="disable one", at="fp16.enabled", got="both enabled", keys=("bf16", "fp16")
            )
        param_dtype = self.data_types.param_dtype
        if param_dtype is not None and DTYPES[param_dtype] != (self.compute_dtype or torch.float32):
            raise problem(
                "the dtype that bf16.enabled or fp16.enabled selects",
                fix="remove it, and enable bf16 or fp16 for 16-bit weights",
                at="data_types.param_dtype",
                got=f'"{param_dtype}"',
                keys=("data_types",),
            )
        return self

    @model_validator(mode="after")
    def _apply_bf16_states(self) -> Self:
        """Two keys set it: `bf16.bf16_optimizer_states` and our own."""
        zero = self.zero_optimization
        block = zero.offload_optimizer
        if not (self.bf16.enabled and self.bf16.bf16_optimizer_states):
            return self
        if "state_dtype" in block.model_fields_set and block.state_dtype != "bf16":
            raise problem(
                f'false together with zero_optimization.offload_optimizer.state_dtype "{block.state_dtype}"',
                fix="remove one of them",
                at="bf16.bf16_optimizer_states",
                got="true",
                keys=("bf16",),
            )
        states = block.model_copy(update={"state_dtype": "bf16"})
        return self.model_copy(update={"zero_optimization": zero.model_copy(update={"offload_optimizer": states})})

    def _user_batch_sizes(self, world_size: int) -> dict[str, int]:
        sizes = {key: getattr(self, key) for key in (TRAIN, MICRO, STEPS) if key in self.model_fields_set}
        block = self.elasticity
        return sizes if block is None or not block.enabled else elastic_sizes(block, sizes, world_size)

    def _with_report(self, report: Report) -> Self:
        """This configuration with its batch sizes completed and its report attached."""
        config = self.model_copy(update=resolve_batch(self._user_batch_sizes(report.world_size), report.world_size))
        config._report = report
        return config
