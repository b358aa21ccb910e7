"""What the engine answers: its configuration, under DeepSpeed's names, and the values it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero.assembly.assembly import Assembly
from zero.config import Config
from zero.config.offload_block import OffloadOptimizerConfig, OffloadParamConfig
from zero.config.precision_block import DTYPES
from zero.config.zero_block import ZeroConfig
from zero.exchange.exchange import Exchange
from zero.params.released import name_of
from zero.ranks import world
from zero.values.access import EngineKeeper
from zero.values.parameters import ParameterValues


class ZeroAccessors:
    """The `zero_optimization` block under DeepSpeed's names; the engine sets `_config`.

    Sizes are in elements. One that the configuration leaves to the plan is None: `engine.plan.limits` has it.
    """

    _config: Config

    @property
    def _zero(self) -> ZeroConfig:
        return self._config.zero_optimization

    def zero_optimization(self) -> bool:
        """True: the stage is above 0."""
        return self._zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """What is sharded over the ranks: 0 nothing, 1 states, 2 gradients too, 3 weights too."""
        return self._zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """True: each rank keeps the sums of its part of the gradients only."""
        return self._zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """True: each rank keeps its part of the weights only."""
        return self._zero.stage >= 3

    def zero_offload_param(self) -> OffloadParamConfig | None:
        """The block, if weights are offloaded."""
        block = self._zero.offload_param
        return None if block.device == "none" else block

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The block, if states are offloaded."""
        block = self._zero.offload_optimizer
        return None if block.device == "none" else block

    def zero_use_cpu_optimizer(self) -> bool:
        """True: states are offloaded, so they are updated by the CPU."""
        return self._zero.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        """True: states are offloaded to host memory."""
        return self._zero.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """True: states are offloaded to NVMe."""
        return self._zero.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> float:
        """Share of the states that is offloaded, where they are."""
        return self._zero.offload_optimizer.ratio

    def zero_sub_group_size(self) -> int | None:
        """Most elements of one update."""
        return self._zero.sub_group_size

    def zero_max_live_parameters(self) -> int | None:
        """Most elements on the device at once."""
        return self._zero.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int | None:
        """A unit that is used again sooner stays."""
        return self._zero.stage3_max_reuse_distance

    def zero_prefetch_bucket_size(self) -> int | None:
        """Elements read ahead beyond the next unit."""
        return self._zero.stage3_prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        """Parameters up to this size stay on the device."""
        return self._zero.stage3_param_persistence_threshold

    def zero_module_granularity_threshold(self) -> int:
        """Modules as fine as this are fetched as one."""
        return self._zero.stage3_module_granularity_threshold

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: a saved model holds whole weights."""
        return self._zero.stage3_gather_16bit_weights_on_model_save

    def zero_ignore_unused_parameters(self) -> bool:
        """False: a step without a gradient for every trained parameter is an error."""
        return self._zero.ignore_unused_parameters

    def zero_reduce_scatter(self) -> bool:
        """As configured; has no effect here."""
        return self._zero.reduce_scatter

    def zero_reduce_bucket_size(self) -> int:
        """As configured; has no effect here."""
        return self._zero.reduce_bucket_size

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        """As configured; has no effect here."""
        return self._zero.use_multi_rank_bucket_allreduce

    def zero_allgather_bucket_size(self) -> int:
        """As configured; has no effect here."""
        return self._zero.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        """As configured; has no effect here."""
        return self._zero.allgather_partitions

    def zero_overlap_comm(self) -> bool:
        """False: whoever starts a reduction of gradients waits for it."""
        return self._zero.overlap_comm

    def zero_contiguous_gradients(self) -> bool:
        """As configured; has no effect here."""
        return self._zero.contiguous_gradients

    def zero_round_robin_gradients(self) -> bool:
        """As configured; has no effect here."""
        return self._zero.round_robin_gradients

    def zero_hpz_partition_size(self) -> int:
        """Ranks that share a second copy of the weights; 1: there is none."""
        return self._zero.zero_hpz_partition_size


class ConfigAccessors(ZeroAccessors):
    """Mixed into the engine, which sets `_config` and `optimizer`."""

    updater: Any

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that see different data: all."""
        return self._config.world_size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share one sample: 1."""
        return 1

    @property
    def global_rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        return world.rank()

    @property
    def local_rank(self) -> int:
        """This rank among those of its node, as the launcher says; 0 without one."""
        return world.local_rank()

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return int(self._config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return int(self._config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return int(self._config.gradient_accumulation_steps)

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 is off."""
        return float(self._config.gradient_clipping)

    def bfloat16_enabled(self) -> bool:
        """True when weights are bf16 with an exact fp32 master."""
        return bool(self._config.bf16.enabled)

    def fp16_enabled(self) -> bool:
        """True when weights are fp16 with an fp32 master."""
        return self._config.fp16.enabled

    def fp16_auto_cast(self) -> bool:
        """True: floating positional arguments of forward are cast to fp16."""
        return self._config.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        """False: masters are fp32."""
        return False

    def bf16_master_weights_and_gradients(self) -> bool:
        """False: masters are fp32."""
        return False

    def bf16_optimizer_states(self) -> bool:
        """True: moments are kept in bf16."""
        return self._config.zero_optimization.offload_optimizer.state_dtype == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """True: the engine's forward runs under torch.autocast."""
        return self._config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """What torch.autocast is told to cast to; None: its own choice."""
        dtype = self._config.torch_autocast.dtype
        return None if dtype is None else DTYPES[dtype]

    def torch_autocast_lower_precision_safe_modules(self) -> list[str] | None:
        """As configured; has no effect here."""
        modules = self._config.torch_autocast.lower_precision_safe_modules
        return None if modules is None else list(modules)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What weights are computed in where the configuration casts them, and what gradients are added up in."""
        return self._config.compute_dtype or torch.float32, self._config.accumulation_dtype

    @property
    def communication_data_type(self) -> torch.dtype:
        """What gradients are exchanged in."""
        given = self._config.communication_data_type
        return self.get_data_types()[0] if given is None else DTYPES[given]

    def postscale_gradients(self) -> bool:
        """True: gradients are divided by the number of ranks after their sum."""
        return not self._config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """Gradients are divided by it before their sum, and by the rest of the number of ranks after it."""
        return self._config.gradient_predivide_factor

    def dynamic_loss_scale(self) -> bool:
        """True: weights are fp16 and a loss scale follows the overflows."""
        return self._config.fp16.enabled and self._config.fp16.dynamic

    def loss_scale(self) -> float:
        """The configured static scale, 0 for a dynamic one; what counts now is `optimizer.cur_scale`."""
        return self._config.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """What a dynamic loss scale begins at."""
        return float(2**self._config.fp16.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How a dynamic loss scale moves, by DeepSpeed's names."""
        fp16 = self._config.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def dataloader_drop_last(self) -> bool:
        """True: loaders drop what does not fill a batch on every rank."""
        return self._config.dataloader_drop_last

    def steps_per_print(self) -> int | None:
        """As configured; None: never."""
        return self._config.steps_per_print

    def optimizer_name(self) -> str | None:
        """Type of the configured optimizer; None if there is no such block."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        groups = self.updater.param_groups if self.updater is not None else []
        return [float(group["lr"]) for group in groups]


class ValueAccessors:
    """Mixed into the engine, which sets `_keeper` and `updater`."""

    _keeper: EngineKeeper
    _parts: Assembly
    exchange: Exchange
    updater: Any

    def current(self, what: str, units: Iterable[int] | None = None) -> None:
        """Wait until these units are as of the last step; the engine's."""
        raise NotImplementedError

    def full_parameter(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.weights(name)

    def full_master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """Copies of one parameter's states (Adam: `exp_avg`, `exp_avg_sq`; fp32, host), and its `step` count.

        An optimizer that keeps further numbers of a parameter has them here too, under their names.
        """
        self.current(f"reading {name}", self._keeper.units_named(name))
        states: dict[str, Any] = dict(self._keeper.moments(name))
        if self.updater is None:
            return {**states, "step": 0}
        key = id(self._keeper.parameter(name))
        numbers = {what: scalar.value for what, scalar in self.updater.numbers(key).items()}
        return {**self.updater.made(key, states), **numbers, "step": self.updater.step_counts.get(key, 0)}

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """A parameter's exact values, states and gradient as of the last step, for `zero.utils.safe_get_full_grad` etc.

        Args:
            parameter: of the model.
            to_change: they are going to be replaced: what was done ahead with them is void.

        Raises:
            StateError: the engine is closed, or a forward or backward runs.
            StorageError: the last step could not be completed.
        """
        units = self._keeper.units_named(name_of(parameter))
        self.current(f"values of {name_of(parameter)}", units)
        if to_change:
            self._keeper.before_change(units)
        return ParameterValues(self._parts, self.exchange, parameter)

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights) of every parameter; tied ones under each of their names."""
        self.current("reading parameters")
        return self._keeper.named_weights()
