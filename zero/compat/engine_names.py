"""The names that DeepSpeed's engine has and ours lacks: set on an engine that `deepspeed.initialize` has made.

Each has a value, or raises NotImplementedError with what to do instead; tests compare them with DeepSpeed's own list.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import zero
from zero.compat import groups
from zero.compat.accelerator_names import get_accelerator
from zero.compat.configs import CONFIG, GETTERS
from zero.compat.timers import EngineThroughput, EngineTimers, SynchronizedWallClockTimer
from zero.compat.to_fp32 import TOOLS
from zero.compat.unavailable import (
    COMPILE,
    COMPRESSION,
    INTERNAL,
    REDUCED,
    SEQUENCES,
    SWAPPERS,
    TIMERS,
    WRITERS,
    missing_function,
    unavailable_error,
)
from zero.engine.engine import ZeroEngine
from zero.engine.pipeline_engine import PipelineEngine
from zero.models.moe import MoE, MOELayer, TopKGate
from zero.params.released_parameter import ReleasedAlias, name_of, warn_of_empty_values
from zero.utils import safe_set_full_fp32_param

# What to do instead -> methods of DeepSpeed's engine that are refused when they are called.
REFUSED = {
    REDUCED: """
        all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback
        sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain
    """,
    "step() clips to gradient_clipping from the configuration": "clip_fp32_gradients",
    "use gradient_accumulation_steps, or no_sync() around all backwards but the last": "coalesce_grad_reduction",
    COMPILE: """
        get_autosp_backend get_autotp_backend get_deepcompile_backend get_deepspeed_compile_backend
        register_compile_pass
    """,
    COMPRESSION: "quantize_training",
    INTERNAL: "get_optimizer_configuration",
    SEQUENCES: "get_sequence_parallel_group",
    SWAPPERS: "swap_tensor_config",
    TIMERS: "print_forward_breakdown",
    "random layer drop is not implemented; drop tokens in the model itself": "random_ltd_initialize",
    "pass a collate_fn, or wrap the data loader": "set_data_post_process_func",
    "use curriculum_learning, and engine.curriculum_scheduler_legacy.set_custom_get_difficulty(function)": (
        "set_custom_curriculum_learning_schedule"
    ),
    WRITERS: "load_moe_state_dict",
}


def load_module_state_dict(
    engine: Any,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
    fetch_z3_params: bool = False,
    z3_params_to_fetch: Iterable[torch.nn.Parameter] | None = None,
    allowed_missing_keys: Iterable[str] | None = None,
) -> None:
    """Load `checkpoint["module"]`, a state dict of whole weights, as on the first rank.

    Args:
        custom_load_fn: called with `src` and `dst` instead of the module's `load_state_dict`.
        fetch_z3_params, z3_params_to_fetch: no effect: all weights that are released are gathered.
        allowed_missing_keys: with `strict`, names that may be missing.

    Raises:
        RuntimeError: `strict`, and names are missing or unexpected.
    """
    state, module = checkpoint["module"], engine.module
    allowed = None if allowed_missing_keys is None else set(allowed_missing_keys)
    with zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=module)
            return
        keys = module.load_state_dict(state, strict=strict and allowed is None)
    missing = set(keys.missing_keys) - (allowed or set())
    if strict and (missing or keys.unexpected_keys):
        raise RuntimeError(
            f"load_module_state_dict: missing {sorted(missing)}, unexpected {sorted(keys.unexpected_keys)}"
        )


def add_deepspeed_names(engine: Any, arguments: Mapping[str, Any] | None = None) -> None:
    """Give an engine DeepSpeed's names. `arguments`: those of `initialize`."""
    arguments = arguments or {}
    is_pipeline = isinstance(engine, PipelineEngine)
    mpu = engine.grid if is_pipeline else arguments.get("mpu")
    groups.use_mpu(mpu)
    names = {
        **{
            name: functools.partial(_answer_of_config, engine, answer)
            for name, answer in (CONFIG | GETTERS).items()
            if not hasattr(type(engine), name)
        },
        **{
            name: missing_function(f"DeepSpeedEngine.{name}", instead)
            for instead, words in REFUSED.items()
            for name in words.split()
        },
        **_argument_names(arguments),
        **_model_names(engine),
        **_group_names(mpu),
        **_engine_names(engine),
        **({} if is_pipeline else {"destroy": functools.partial(ZeroEngine.destroy, engine, keeps_shards=True)}),
    }
    for name, value in names.items():
        setattr(engine, name, value)
    client = arguments.get("optimizer")
    if client is not None:
        engine.optimizer_name = lambda: type(client).__name__
    known = engine.module._state_dict_hooks.values()  # of an engine of this model before
    if not engine.run.collectives.placement.is_single_rank and _empty_released_values not in known:
        engine.module.register_state_dict_post_hook(_empty_released_values)
    if engine.updater is not None:
        engine.updater.__dict__["optimizer"] = engine.updater  # in DeepSpeed it is the wrapped optimizer
        engine.updater.__dict__["refresh_fp32_params"] = functools.partial(_refresh_masters, engine)


def _answer_of_config(engine: Any, answer: Callable[[Any], Any]) -> Any:
    return answer(engine._config)


def _argument_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "client_lr_scheduler": arguments.get("lr_scheduler"),
        "client_optimizer": arguments.get("optimizer"),
        "mesh_device": arguments.get("mesh_param"),
        "training_data": arguments.get("training_data"),
    }


def _model_names(engine: Any) -> dict[str, Any]:
    modules = [*engine.module.modules()]
    mixtures = [module for module in modules if isinstance(module, MoE)]
    return {
        "gate_modules": [module for module in modules if isinstance(module, TopKGate)],
        "has_moe_layers": bool(mixtures),
        "moe_layers": [module for module in modules if isinstance(module, MOELayer)],
        "num_experts": [module.num_experts for module in mixtures],
        "expert_data_parallel_group": {module.expert_group_name: dist.group.WORLD for module in mixtures},
        "expert_parallel_group": {},  # no token is sent to another rank
        "param_names": {parameter: name for name, parameter in engine.module.named_parameters()},
        "sparse_tensor_module_names": set(),
    }


def _group_names(mpu: Any) -> dict[str, Any]:
    return {
        "all_to_all_group": None,
        "checkpoint_mp_rank": 0,
        "data_parallel_group": groups.get_data_parallel_group(),
        "dist_backend": get_accelerator().communication_backend_name(),
        "get_data_parallel_rank": groups.get_data_parallel_rank,
        "get_model_parallel_rank": groups.get_model_parallel_rank,
        "get_tensor_parallel_rank": groups.get_model_parallel_rank,
        "loaded_checkpoint_dp_world_size": None,
        "loaded_checkpoint_mp_world_size": None,
        "local_all_to_all_group": None,
        "mpu": mpu,
        "seq_data_parallel_group": groups.get_data_parallel_group(),
        "seq_dp_world_size": groups.get_data_parallel_world_size(),
        "sequence_parallel_size": 1,
        "use_ds_comm": False,
    }


def _engine_names(engine: Any) -> dict[str, Any]:
    writer = {name: missing_function(f"checkpoint_engine.{name}", WRITERS) for name in ("save", "load", "commit")}
    is_timed = engine.wall_clock_breakdown()
    return {
        "_get_optimizer_ckpt_name": _optimizer_file,
        "allreduce_gradients": _nothing_to_reduce,
        "basic_optimizer": engine.updater,
        **dict.fromkeys(("block_eigenvalue", "compression_scheduler", "eigenvalue", "quantizer")),
        "checkpoint_engine": SimpleNamespace(**writer),
        "checkpoint_tools": TOOLS,
        "collect_python_gc": gc.collect,
        "dont_change_device": False,
        "enable_backward_allreduce": True,
        "engine_timers": EngineTimers(is_timed, is_timed or engine.flops_profiler_enabled()),
        "flatten": torch._utils._flatten_dense_tensors,
        "get_pld_theta": lambda: getattr(engine.progressive_layer_drop, "current_theta", None),
        "get_type": lambda: [group.get("type", 0.0) for group in getattr(engine.optimizer, "param_groups", ())],
        "gradient_average": True,
        "hooks_for_optimizer": True,
        "is_iterable_style_dataset": lambda obj: isinstance(obj, IterableDataset),
        "is_map_style_dataset": lambda obj: hasattr(obj, "__getitem__") and hasattr(obj, "__len__"),
        "load_module_state_dict": functools.partial(load_module_state_dict, engine),
        "losses": None,
        "optimized_linear_base_weight_sharding": False,
        "optimized_linear_lora_enabled": False,
        "pipeline_parallelism": isinstance(engine, PipelineEngine),
        "scale_wrt_gas": None,
        "timers": SynchronizedWallClockTimer(engine),
        "torch_autocast_z0_gradscaler": None,
        "tput_timer": EngineThroughput(engine),
        "unflatten": torch._utils._unflatten_dense_tensors,
        "warn_unscaled_loss": True,
    }


def _empty_released_values(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """As in DeepSpeed: one rank of several cannot read these, and clients look whether such a value has elements."""
    for name, value in state.items():
        if isinstance(value, ReleasedAlias):
            warn_of_empty_values()
            state[name] = torch.empty(0, dtype=value.dtype, device="cpu")


def _refresh_masters(engine: Any) -> None:
    """Make each trained weight its own fp32 master: fp16 weights were changed in place. All ranks call this."""
    for group in engine.updater.param_groups:
        for parameter in group["params"]:
            safe_set_full_fp32_param(parameter, engine.full_parameter(name_of(parameter)).float())


def _nothing_to_reduce(bucket_size: int = 0) -> None:
    """Does nothing, since backward has reduced the gradients."""


def _optimizer_file(checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
    raise unavailable_error(
        "DeepSpeedEngine._get_optimizer_ckpt_name",
        "checkpoints of zero-infinity have no such file; use load_checkpoint",
    )
