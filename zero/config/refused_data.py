"""Blocks of DeepSpeed's features that choose or cut the samples: refused when switched on, harmless otherwise."""

from __future__ import annotations

from typing import Annotated, ClassVar

from zero.config.fields import (
    Block,
    Flag,
    InertCount,
    InertFlag,
    InertItems,
    InertNumber,
    InertObject,
    InertText,
    InertWhole,
    off,
)


class ScheduleConfig(Block):
    """How a curriculum's difficulty grows."""

    why: ClassVar[str] = "it belongs to curriculum learning, which is off"

    total_curriculum_step: InertWhole = None
    difficulty_step: InertWhole = None
    root_degree: InertNumber = None
    difficulty: InertItems = None
    max_step: InertItems = None


class CurriculumLearning(Block):
    """`curriculum_learning`: would cut the sequences."""

    why: ClassVar[str] = "it belongs to curriculum learning, which is off"

    enabled: Annotated[Flag, off("curriculum learning", "cut the sequences in collate_fn")] = False
    curriculum_type: InertText = None
    min_difficulty: InertWhole = None
    max_difficulty: InertWhole = None
    schedule_type: InertText = None
    schedule_config: ScheduleConfig | None = None


class CurriculumSampling(Block):
    """`data_efficiency.data_sampling.curriculum_learning`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    data_cluster_path: InertText = None
    curriculum_metrics: InertObject = None


class DynamicBatching(Block):
    """`data_efficiency.data_sampling.dynamic_batching`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    metrics_path: InertText = None
    lr_scaling_method: InertText = None
    min_batch_size: InertWhole = None
    max_batch_size: InertWhole = None
    sequence_picking_order: InertText = None
    max_tokens: InertWhole = None
    verbose: InertFlag = None


class DataSampling(Block):
    """`data_efficiency.data_sampling`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    num_epochs: InertWhole = None
    num_workers: InertWhole = None
    pin_memory: InertFlag = None
    curriculum_learning: CurriculumSampling | None = None
    dynamic_batching: DynamicBatching | None = None


class LayerTokenLrSchedule(Block):
    """`random_ltd.layer_token_lr_schedule`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    total_layer_tokens: InertCount = None
    warmup_type: InertText = None
    warmup_layer_tokens: InertCount = None


class RandomLtdScheduleConfig(Block):
    """`random_ltd.random_ltd_schedule.schedule_config`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    seq_per_step: InertWhole = None
    require_steps: InertWhole = None


class RandomLtdSchedule(Block):
    """`random_ltd.random_ltd_schedule`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    min_value: InertWhole = None
    max_value: InertWhole = None
    schedule_type: InertText = None
    schedule_config: RandomLtdScheduleConfig | None = None


class RandomLtd(Block):
    """`data_efficiency.data_routing.random_ltd`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    total_layer_num: InertWhole = None
    random_ltd_layer_num: InertWhole = None
    random_ltd_layer_id: InertItems = None
    model_mask_name: InertText = None
    model_type: InertText = None
    hidden_state_order: InertText = None
    micro_batch_size: InertWhole = None
    global_batch_size: InertWhole = None
    random_ltd_schedule: RandomLtdSchedule | None = None
    layer_token_lr_schedule: LayerTokenLrSchedule | None = None


class DataRouting(Block):
    """`data_efficiency.data_routing`."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: InertFlag = None
    random_ltd: RandomLtd | None = None


class DataEfficiency(Block):
    """`data_efficiency`: would choose and cut the samples. Its parts act only if it is enabled itself."""

    why: ClassVar[str] = "it belongs to data efficiency, which is off"

    enabled: Annotated[Flag, off("data efficiency", "choose samples with a sampler of your own DataLoader")] = False
    seed: InertWhole = None
    data_sampling: DataSampling | None = None
    data_routing: DataRouting | None = None
