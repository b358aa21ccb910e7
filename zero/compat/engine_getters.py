"""Getters of DeepSpeed's engine for its configuration: a row is a name, the answer, and one line with its meaning.

The engine imports this table and inherits its rows; the table itself uses only the configuration and the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from zero.config import Config
from zero.config.fields import default_of, parse_flag
from zero.config.numbers import parse_count
from zero.config.precision_block import DTYPES
from zero.config.zero_block import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from zero.dist import world

OWN_NAMES = {name: name.lower() for name in ("Adam", "AdamW", "Lamb", "Lion", "Muon")}

NO_EFFECT = "As configured; has no effect here."

T = TypeVar("T")
Block = TypeVar("Block", OffloadParamConfig, OffloadOptimizerConfig)


def method(answer: Callable[[Config], T], means: str) -> Callable[[Any], T]:
    """A row that is a method."""

    def getter(self: Any) -> T:
        return answer(self._config)

    getter.__doc__, getter.__annotations__ = means, {}
    return getter


def zero(answer: Callable[[ZeroConfig], T], means: str) -> Callable[[Any], T]:
    """Like `method`, for the block `zero_optimization`."""
    return method(lambda config: answer(config.zero_optimization), means)


def inactive_value(config: Config, block: str, key: str) -> Any:
    """The value of a key that has no effect, in the form of its default: the key is not checked when it is read."""
    values = getattr(config, block)
    value, default = getattr(values, key), default_of(values.rows[key])
    try:
        if isinstance(default, bool):
            return parse_flag(value)
        return parse_count(value) if isinstance(default, int) else value
    except ValueError:
        return default


def inactive(key: str) -> Callable[[Any], Any]:
    """A row for such a key of `zero_optimization`."""
    return method(lambda config: inactive_value(config, "zero_optimization", key), NO_EFFECT)


class attribute(property, Generic[T]):
    """A row that is a property."""

    def __init__(self, answer: Callable[[Config], T], means: str) -> None:
        super().__init__(lambda engine: answer(engine._config))
        self.__doc__ = means  # otherwise it would be the docstring of this class

    if TYPE_CHECKING:

        def __get__(self, engine: Any, kind: type | None = None) -> T: ...  # type: ignore[override]


def set_getter_names(table: type[T]) -> type[T]:
    """Set the name of each function to its name in the class."""
    for name, getter in vars(table).items():
        if isinstance(getter, FunctionType):
            getter.__name__, getter.__qualname__ = name, f"{table.__qualname__}.{name}"
    return table


def _block_if_used(block: Block) -> Block | None:
    return None if block.device == "none" else block


def _dtypes(config: Config) -> tuple[torch.dtype, torch.dtype]:
    return config.compute_dtype or torch.float32, config.accumulation_dtype


def _autocast_dtype(config: Config) -> torch.dtype | None:
    dtype = config.torch_autocast.dtype
    return None if dtype is None else DTYPES[dtype]


def _safe_modules(config: Config) -> list[str] | None:
    modules = inactive_value(config, "torch_autocast", "lower_precision_safe_modules")
    return list(modules) if isinstance(modules, (list, tuple)) else None


def _communication_dtype(config: Config) -> torch.dtype:
    name = config.communication_data_type
    return _dtypes(config)[0] if name is None else DTYPES[name]


def _first_scale(config: Config) -> float:
    return float(2**config.fp16.initial_scale_power)


def _scale_arguments(config: Config) -> dict[str, Any]:
    fp16 = config.fp16
    return {
        "init_scale": _first_scale(config),
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


@set_getter_names
class ConfigGetters:
    """A mixin of the engine, which sets `_config`.

    Sizes are in elements. A size that the configuration leaves to the plan is None; `engine.plan.limits` has its value.
    """

    _config: Config

    # ---- ranks ------------------------------------------------------------------------------------

    world_size = attribute(lambda c: c.world_size, "Number of ranks.")
    dp_world_size = attribute(lambda c: c.world_size, "Number of ranks that see different data: all.")
    mp_world_size = attribute(lambda c: 1, "Number of ranks that share one sample: 1.")
    global_rank = attribute(lambda c: world.rank(), "This rank, 0 <= rank < world_size.")
    local_rank = attribute(lambda c: world.local_rank(), "This rank on its node, as the launcher says; 0 without one.")

    # ---- the engine's own counts, by DeepSpeed's names ----------------------------------------------

    engine_timers_cache = property(lambda engine: engine.get_wall_clock_timers(), doc="Milliseconds by timer.")
    gas_boundary_ctr = property(lambda engine: engine.global_steps, doc="Steps since the beginning.")
    inside_no_sync_ctxt = property(lambda engine: engine.accumulation.inside_no_sync, doc="True inside `no_sync`.")

    # ---- batches and gradients --------------------------------------------------------------------

    train_batch_size = method(lambda c: c.train_batch_size, "Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu = method(lambda c: c.train_micro_batch_size_per_gpu, "Samples of a rank's forward.")
    gradient_accumulation_steps = method(lambda c: c.gradient_accumulation_steps, "Micro-batches per optimizer step.")
    gradient_clipping = method(lambda c: c.gradient_clipping, "Largest global norm; 0 is off.")
    postscale_gradients = method(lambda c: not c.prescale_gradients, "True: gradients are divided after their sum.")
    gradient_predivide_factor = method(
        lambda c: c.gradient_predivide_factor,
        "Gradients are divided by it before their sum, and by the rest of the number of ranks after it.",
    )
    dataloader_drop_last = method(lambda c: c.dataloader_drop_last, "True: loaders drop what does not fill a batch.")
    get_batch_info = method(
        lambda c: (c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps),
        "The three sizes of a batch: of a step, of a rank's forward, and micro-batches of a step.",
    )
    steps_per_print = method(lambda c: c.steps_per_print, "As configured; None: never.")
    wall_clock_breakdown = method(lambda c: c.wall_clock_breakdown, "True: each step's times are logged.")
    memory_breakdown = method(lambda c: c.memory_breakdown, "True: each step's memory is logged.")
    flops_profiler_enabled = method(
        lambda c: c.flops_profiler is not None and c.flops_profiler.enabled, "True: one forward is measured."
    )
    optimizer_name = method(
        lambda c: None if c.optimizer is None else OWN_NAMES.get(c.optimizer.type, c.optimizer.type),
        "Type of the configured optimizer, DeepSpeed's own in lower case; None if there is no such block.",
    )

    # ---- dtypes and the loss scale ----------------------------------------------------------------

    bfloat16_enabled = method(lambda c: c.bf16.enabled, "True when weights are bf16 with an exact fp32 master.")
    fp16_enabled = method(lambda c: c.fp16.enabled, "True when weights are fp16 with an fp32 master.")
    fp16_auto_cast = method(lambda c: c.fp16.auto_cast, "True: floating positional arguments of forward become fp16.")
    fp16_master_weights_and_gradients = method(lambda c: c.bf16_masters, "True: weights are their own masters.")
    bf16_master_weights_and_gradients = method(lambda c: c.bf16_masters, "True: weights are their own masters.")
    bf16_optimizer_states = zero(lambda z: z.offload_optimizer.state_dtype == "bf16", "True: moments are kept in bf16.")
    torch_autocast_enabled = method(lambda c: c.torch_autocast.enabled, "True: forward runs under torch.autocast.")
    torch_autocast_dtype = method(_autocast_dtype, "The dtype that torch.autocast casts to; None: its own choice.")
    torch_autocast_lower_precision_safe_modules = method(_safe_modules, NO_EFFECT)
    get_data_types = method(_dtypes, "What weights are computed in, if cast, and what gradients are added up in.")
    communication_data_type = attribute(_communication_dtype, "The dtype in which gradients travel between ranks.")
    dynamic_loss_scale = method(lambda c: c.fp16.enabled and c.fp16.dynamic, "True: the fp16 scale follows overflows.")
    loss_scale = method(lambda c: c.fp16.loss_scale, "The static scale, 0: dynamic; it is `optimizer.cur_scale` now.")
    initial_dynamic_scale = method(_first_scale, "What a dynamic loss scale begins at.")
    dynamic_loss_scale_args = method(_scale_arguments, "How a dynamic loss scale moves, by DeepSpeed's names.")

    # ---- the block zero_optimization --------------------------------------------------------------

    zero_optimization = zero(lambda z: z.stage > 0, "True: the stage is above 0.")
    zero_optimization_stage = zero(lambda z: z.stage, "0: nothing is sharded; 1 states, 2 gradients, 3 weights too.")
    zero_optimization_partition_gradients = zero(lambda z: z.stage >= 2, "True: gradients are sharded.")
    zero_optimization_partition_weights = zero(lambda z: z.stage >= 3, "True: weights are sharded.")
    zero_offload_param = zero(lambda z: _block_if_used(z.offload_param), "The block, if weights are offloaded.")
    zero_offload_optimizer = zero(lambda z: _block_if_used(z.offload_optimizer), "The block, if states are offloaded.")
    zero_use_cpu_optimizer = zero(lambda z: z.offload_optimizer.device != "none", "True: the CPU updates.")
    zero_cpu_offload = zero(lambda z: z.offload_optimizer.device == "cpu", "True: states are offloaded to host memory.")
    zero_nvme_offload_optimizer = zero(lambda z: z.offload_optimizer.device == "nvme", "True: states are on NVMe.")
    zero_partial_offload = zero(lambda z: z.offload_optimizer.ratio, "Share of the states that is offloaded.")
    zero_sub_group_size = zero(lambda z: z.sub_group_size, "Most elements of one update.")
    zero_max_live_parameters = zero(lambda z: z.stage3_max_live_parameters, "Most elements on the device at once.")
    zero_max_reuse_distance = zero(lambda z: z.stage3_max_reuse_distance, "A unit that is used again sooner stays.")
    zero_prefetch_bucket_size = zero(lambda z: z.stage3_prefetch_bucket_size, "Elements read ahead of the next unit.")
    zero_param_persistence_threshold = zero(
        lambda z: z.stage3_param_persistence_threshold, "Parameters up to this size stay on the device."
    )
    zero_module_granularity_threshold = zero(
        lambda z: z.stage3_module_granularity_threshold, "Modules as fine as this are fetched as one."
    )
    zero_gather_16bit_weights_on_model_save = zero(
        lambda z: z.stage3_gather_16bit_weights_on_model_save, "True: a saved model holds whole weights."
    )
    zero_ignore_unused_parameters = zero(
        lambda z: z.ignore_unused_parameters,
        "False: a step without a gradient for every trained parameter is an error.",
    )
    zero_overlap_comm = zero(lambda z: z.overlap_comm, "False: whoever starts a reduction of gradients waits for it.")
    zero_hpz_partition_size = zero(lambda z: z.zero_hpz_partition_size, "Ranks that share a second copy of weights.")
    zero_reduce_scatter = inactive("reduce_scatter")
    zero_reduce_bucket_size = inactive("reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = inactive("use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = inactive("allgather_bucket_size")
    zero_allgather_partitions = inactive("allgather_partitions")
    zero_contiguous_gradients = inactive("contiguous_gradients")
    zero_round_robin_gradients = inactive("round_robin_gradients")
