"""`deepspeed.runtime.config` and `runtime.zero.config`: our configuration under DeepSpeed's names.

`CONFIG`: attributes of `DeepSpeedConfig`, name -> a function of our configuration. `GETTERS`: further methods of the
engine, which has those of `CONFIG` too.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from offload.errors import ConfigError
from zero.compat.engine_getters import OWN_NAMES
from zero.compat.logs import logger
from zero.compat.monitoring import BLOCKS, DeepSpeedMonitorConfig
from zero.config import Config, load_config, reading_as_deepspeed
from zero.config.fields import InactiveBlock
from zero.config.known_keys import keys_of
from zero.config.precision_block import DTYPES, Bf16Config, Fp16Config
from zero.config.zero_block import ZeroConfig
from zero.dist import world

Answer = Callable[[Config], Any]

# DeepSpeed's attribute of a configuration -> the block of the JSON.
BLOCKS_BY_NAME = {
    "bfloat16_config": "bf16",
    "compression_config": "compression_training",
    "datastates_config": "datastates_ckpt",
    "expert_parallel_config": "expert_parallel",
    "float16_config": "fp16",
} | {
    f"{block}_config": block
    for block in (
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "compile",
        "flops_profiler",
        "hybrid_engine",
        "nebula",
        "tensor_parallel",
        "timers",
        "weight_quantization",
    )
}
# What DeepSpeed answers of the data efficiency library when it is off; here it is not available.
DATA_EFFICIENCY: dict[str, Any] = {
    "enabled": False,
    "seed": 1234,
    "data_sampling": {
        "enabled": False,
        "num_epochs": 1000,
        "num_workers": 0,
        "pin_memory": False,
        "curriculum_learning": {"enabled": False},
        "dynamic_batching": {"enabled": False},
    },
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}},
}
# DeepSpeed's name -> key of `eigenvalue`, and DeepSpeed's default; without effect here.
EIGENVALUE = {
    "enabled": False, "verbose": False, "max_iter": 100, "tol": 1e-2, "stability": 1e-6, "gas_boundary_resolution": 1,
    "layer_name": "bert.encoder.layer", "layer_num": 0,
}  # fmt: skip


def block_of_config(config: Config, name: str) -> Any:
    """A block of the configuration; one that was not given has its defaults, and is disabled."""
    block = getattr(config, name)
    kind = keys_of(type(config))[name].inner
    if isinstance(kind, InactiveBlock):
        return _values_of(kind, block or {})
    if block is not None:
        return block
    return {} if kind is None else kind(**({"enabled": False} if "enabled" in keys_of(kind) else {}))


def _values_of(block: InactiveBlock, values: Mapping[str, Any]) -> SimpleNamespace:
    """The keys of a block in which none acts, as attributes: as they were given, else their defaults."""
    content: dict[str, Any] = {"enabled": False} if "enabled" in keys_of(block) else {}
    for name, key in keys_of(block).items():
        if isinstance(key.inner, InactiveBlock):
            content[name] = _values_of(key.inner, values.get(name) or {})
        else:
            content[name] = values.get(name, content.get(name, key.default))
    return SimpleNamespace(**content)


def user_value(config: Config, block: str, key: str | None = None, default: Any = None) -> Any:
    """A block of the JSON as the user wrote it, or a key of it; the default if it is not there."""
    content = config.source.get(block)
    if content is None or key is None:
        return default if content is None else content
    value = content.get(key) if isinstance(content, Mapping) else None
    return default if value is None else value


def value_getter(path: str, default: Any = None) -> Answer:
    """The value at a dotted path of the configuration; DeepSpeed's default where ours is None."""

    def answer(config: Config) -> Any:
        value: Any = config
        for key in path.split("."):
            value = block_of_config(value, key) if isinstance(value, Config) and key != path else getattr(value, key)
        return default if value is None else value

    return answer


def _parameters_getter(block: str) -> Answer:
    """The parameters of a block without its `enabled`; False: there is no such block, as in DeepSpeed."""

    def answer(config: Config) -> Any:
        content = user_value(config, block)
        if not isinstance(content, Mapping):
            return False
        return {key: item for key, item in content.items() if key != "enabled"}

    return answer


def optimizer_name(config: Config) -> str | None:
    return None if config.optimizer is None else OWN_NAMES.get(config.optimizer.type, config.optimizer.type)


def _torch_dtype(path: str) -> Answer:
    return lambda config: DTYPES.get(value_getter(path)(config))


CONFIG: dict[str, Answer] = {
    "amp_enabled": value_getter("amp.enabled", False),
    "amp_params": _parameters_getter("amp"),
    "checkpoint_parallel_write_pipeline": lambda c: bool(
        (value_getter("checkpoint.parallel_write", {})(c)).get("pipeline_stage")
    ),
    "checkpoint_tag_validation_enabled": lambda c: c.checkpoint.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda c: c.checkpoint.tag_validation == "fail",
    "curriculum_enabled_legacy": value_getter("curriculum_learning.enabled"),
    "curriculum_params_legacy": _parameters_getter("curriculum_learning"),
    "data_efficiency_config": lambda c: DATA_EFFICIENCY,
    "data_efficiency_enabled": value_getter("data_efficiency.enabled", False),
    "disable_allgather": value_getter("disable_allgather", False),
    "disable_python_gc": value_getter("disable_python_gc", False),
    **{f"eigenvalue_{key}": value_getter(f"eigenvalue.{key}", default) for key, default in EIGENVALUE.items()},
    "elastic_model_parallel_size": value_getter("elasticity.model_parallel_size"),
    "elasticity_enabled": value_getter("elasticity.enabled"),
    "global_rank": lambda c: world.rank(),
    "grad_accum_dtype": value_getter("data_types.grad_accum_dtype"),
    "graph_harvesting": value_getter("graph_harvesting", False),
    "keep_in_fp32_modules": lambda c: user_value(c, "data_types", "keep_in_fp32_modules"),
    "load_universal_checkpoint": value_getter("checkpoint.load_universal", False),
    "log_level": value_getter("log_level", "info"),
    "mics_hierarchial_params_gather": value_getter("zero_optimization.mics_hierarchical_params_gather", False),
    "mics_shard_size": value_getter("zero_optimization.mics_shard_size"),
    "num_gpus_per_node": value_getter("elasticity.num_gpus_per_node"),
    "optimizer_legacy_fusion": lambda c: user_value(c, "optimizer", "legacy_fusion", False),
    "optimizer_name": optimizer_name,
    "optimizer_params": lambda c: user_value(c, "optimizer", "params"),
    "param_dtype": lambda c: user_value(c, "data_types", "param_dtype"),
    "pld_enabled": value_getter("progressive_layer_drop.enabled"),
    "pld_params": _parameters_getter("progressive_layer_drop"),
    "scheduler_name": lambda c: user_value(c, "scheduler", "type"),
    "scheduler_params": lambda c: user_value(c, "scheduler", "params"),
    "sparse_gradients_enabled": value_getter("sparse_gradients", False),
    "torch_autocast_dtype": _torch_dtype("torch_autocast.dtype"),
    "torch_autocast_enabled": value_getter("torch_autocast.enabled"),
    "torch_autocast_lower_precision_safe_modules": value_getter("torch_autocast.lower_precision_safe_modules"),
    "use_data_before_expert_parallel_": value_getter("use_data_before_expert_parallelism", False),
    "use_node_local_storage": value_getter("checkpoint.use_node_local_storage"),
    "zero_allow_untested_optimizer": value_getter("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": value_getter("zero_force_ds_cpu_optimizer", True),
}


def _zero_flag(key: str, *, default: bool = False) -> Answer:
    return value_getter(f"zero_optimization.{key}", default)


GETTERS: dict[str, Answer] = {
    "aio_config": value_getter("aio"),
    "autotp_size": value_getter("tensor_parallel.autotp_size", 0),
    "autotuning_enabled": value_getter("autotuning.enabled"),
    "autotuning_end_profile_step": value_getter("autotuning.end_profile_step"),
    "autotuning_metric": value_getter("autotuning.metric"),
    "autotuning_metric_path": value_getter("autotuning.metric_path", os.path.abspath("autotuning_metric.json")),
    "autotuning_model_info_path": value_getter(
        "autotuning.model_info_path", os.path.abspath("autotuning_model_info.json")
    ),
    "autotuning_profile_model_info": lambda c: False,
    "autotuning_start_profile_step": value_getter("autotuning.start_profile_step"),
    "checkpoint_serialization_enabled": value_getter("checkpoint.checkpoint_serialization", True),
    "checkpoint_writer_enabled": lambda c: user_value(c, "checkpoint", "writer") is not None,
    "compile_autosp": lambda c: "autosp" in (value_getter("compile.passes")(c) or ()),
    "compile_autotp": lambda c: "autotp" in (value_getter("compile.passes")(c) or ()),
    "compile_zero_optimization_stage": lambda c: bool({"z1", "z3"} & {*(value_getter("compile.passes")(c) or ())}),
    "cpuadam_cores_perc": value_getter("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
    "curriculum_learning_config": lambda c: DATA_EFFICIENCY["data_sampling"]["curriculum_learning"],
    "curriculum_learning_enabled": lambda c: False,
    "data_sampling_config": lambda c: DATA_EFFICIENCY["data_sampling"],
    "data_sampling_enabled": lambda c: False,
    "dump_state": value_getter("dump_state"),
    "flops_profiler_detailed": value_getter("flops_profiler.detailed", True),
    "flops_profiler_module_depth": value_getter("flops_profiler.module_depth"),
    "flops_profiler_output_file": value_getter("flops_profiler.output_file"),
    "flops_profiler_profile_step": value_getter("flops_profiler.profile_step"),
    "flops_profiler_recompute_fwd_factor": value_getter("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_top_modules": value_getter("flops_profiler.top_modules"),
    "get_compile_time": lambda c: [],
    "is_deepcompile_active": lambda c: False,
    "is_deepcompile_enabled": value_getter("compile.deepcompile", False),
    "is_elastic_model_parallel_supported": value_getter("elasticity.enabled"),
    "is_first_weights_partition_group": lambda c: c.zero_optimization.stage >= 3,
    "is_sanity_checks_enabled": _zero_flag("enable_sanity_checks"),
    "managed_gradient_accumulation": value_getter("managed_gradient_accumulation"),
    "pld_gamma": value_getter("progressive_layer_drop.gamma"),
    "pld_theta": value_getter("progressive_layer_drop.theta"),
    "random_ltd_config": lambda c: DATA_EFFICIENCY["data_routing"]["random_ltd"],
    "random_ltd_enabled": lambda c: False,
    "super_offload": value_getter("zero_optimization.offload_optimizer.super_offload", False),
    "tensor_parallel_config": lambda c: block_of_config(c, "tensor_parallel"),
    "uses_parallelization_pass_only": lambda c: False,
    "zenflow_config": value_getter("zero_optimization.zenflow"),
    "zero_allgather_sequential": _zero_flag("stage3_allgather_sequential"),
    "zero_compute_grad_norm": _zero_flag("compute_grad_norm", default=True),
    "zero_elastic_checkpoint": _zero_flag("elastic_checkpoint"),
    "zero_legacy_stage1": _zero_flag("legacy_stage1"),
    "zero_load_from_fp32_weights": _zero_flag("load_from_fp32_weights", default=True),
    "zero_log_trace_cache_warnings": _zero_flag("log_trace_cache_warnings"),
    "zero_model_persistence_threshold": value_getter("zero_optimization.stage3_model_persistence_threshold"),
    "zero_parameter_alignment": _zero_flag("parameter_alignment"),
    "zero_quantized_gradients": _zero_flag("zero_quantized_gradients"),
    "zero_quantized_nontrainable_weights": _zero_flag("zero_quantized_nontrainable_weights"),
    "zero_quantized_weights": _zero_flag("zero_quantized_weights"),
    "zero_save_muon_momentum_buffer_in_memory": _zero_flag("save_muon_momentum_buffer_in_memory"),
    "zeropp_loco_param": value_getter("zero_optimization.zeropp_loco_param"),
}


# Values of `optimizer.type` that DeepSpeed lists and that work here; any class of torch.optim works too.
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    return Bf16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> Fp16Config:
    return Fp16Config(**(param_dict.get("fp16") or {}))


class ValidationMode:
    """What happens if the ranks give checkpoints different tags."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DeepSpeedZeroConfig(ZeroConfig):
    """The block `zero_optimization`, from keyword arguments that are the keys of the JSON.

    Keys that begin with `stage3_` can be read without it too. Raises ConfigError: names all problems at once.
    """

    def __init__(self, **keys: Any) -> None:
        with reading_as_deepspeed():
            block = load_config({"zero_optimization": keys}).zero_optimization
        self.__setstate__(block.__getstate__())

    @classmethod
    def from_block(cls, block: ZeroConfig) -> DeepSpeedZeroConfig:
        """The same block, of this class."""
        copy = cls.__new__(cls)
        copy.__setstate__(block.__getstate__())
        return copy

    def __getattr__(self, name: str) -> Any:
        if name in self.aliases:
            return getattr(self, self.aliases[name])
        return super().__getattr__(name)  # type: ignore[misc]


class DeepSpeedConfig:
    """A configuration, read and checked; its values are attributes, as in DeepSpeed.

    Raises ConfigError: names all problems at once. `config`: path or dict.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("DeepSpeedConfig: mpu and mesh_device are not available; leave them out")
        with reading_as_deepspeed():
            self.config = load_config(config)
        zero = self.config.zero_optimization
        self.zero_config = DeepSpeedZeroConfig.from_block(zero)
        self.zero_optimization_stage, self.zero_enabled = zero.stage, zero.stage > 0
        self._param_dict = dict(self.config._report.source)
        logs = block_of_config(self.config, "comms_logger")
        self.comms_config = SimpleNamespace(comms_logger=logs, comms_logger_enabled=logs.enabled)
        self.monitor_config = DeepSpeedMonitorConfig(**{name: getattr(self.config, name) for name in BLOCKS})

    def __getattr__(self, name: str) -> Any:
        """Keys of the configuration, and DeepSpeed's names of its blocks and values."""
        if name.startswith("_") or name == "config":
            raise AttributeError(name)
        if name in BLOCKS_BY_NAME:
            return block_of_config(self.config, BLOCKS_BY_NAME[name])
        return CONFIG[name](self.config) if name in CONFIG else getattr(self.config, name)

    def print_user_config(self) -> None:
        """Log the configuration as it was given."""
        logger.info("json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=repr))

    def print(self, name: str) -> None:
        """Log every value of the configuration, under this title."""
        logger.info("%s:", name)
        for key, value in self.config:
            logger.info("  %s: %s", key, value)
        self.print_user_config()
