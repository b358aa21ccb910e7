"""Names of DeepSpeed that this library lacks: they can be imported, and their use raises an error with advice."""

from __future__ import annotations

import builtins
import enum
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

TENSORS = "tensor parallelism is not implemented; stage 3 shards weights over the same ranks without it"
SEQUENCES = "sequence parallelism is not implemented; use torch.distributed.tensor.experimental.context_parallel"
SLICES = "torch.utils.checkpoint around each slice of the sequence does it, as TiledMLP does for a module"
PIPELINES = "the schedules are torch.distributed.pipelining's; zero.pipe.PipelineModule and pipeline.schedule choose"
EXPERTS = (
    "experts are not dealt out to ranks; moe.layer.MoE has them on all, and a model's own experts "
    "(ModuleList, or packed as transformers has them) are units of which only those that are called move"
)
COMPRESSION = "compression training is not implemented; quantise the base with bitsandbytes or torchao, or the result"
ONE_BIT = "1-bit optimizers are not implemented; use AdamW, with communication_data_type for less traffic"
KERNELS = "DeepSpeed's kernels are not part of it; torch's scaled_dot_product_attention and torch.compile do that"
INFERENCE = "inference kernels are not implemented; deepspeed.init_inference streams a model larger than memory"
ROLLOUTS = "engine.generate() makes rollouts; hybrid_engine in the configuration keeps weights on the device for them"
UNIVERSAL = "it is not needed: a checkpoint loads at any stage, tier and number of ranks as it is"
SWAPPERS = "DeepSpeed's swappers are not part of it; zero_optimization.offload_param and offload_optimizer are"
ASYNC_IO = "AsyncIOBuilder().load().aio_handle(...) has the engine's I/O, and `zero tune` or ds_io measures a disk"
COMPILE = "DeepCompile is not available; engine.compile() has torch compile the model"
TIMERS = "engine.statistics() has what it counts"
SCALER = "the engine scales the loss itself; set fp16 in the configuration, and read optimizer.loss_scale"
WRITERS = "DeepSpeed's checkpoint writers are not part of it; engine.save_checkpoint writes with the engine's own I/O"
CONFIG = "DeepSpeedConfig(...) has the whole configuration, its blocks as attributes"
STAGES = "DeepSpeed's own machinery of sharding is not part of it; the engine has its own, behind the same calls"
LAUNCHER = "`zero run` starts the ranks, on one node or several; `zero run --help` tells how"

# Prefix of a name below `deepspeed` -> what a user can do instead; the longest matching prefix counts.
INSTEAD: dict[str, str] = {
    "": "nothing here stands for it; leave it out, or do it with torch",
    "accelerator": "get_accelerator() has the one of this process; ZERO_DEVICE chooses it",
    "autotuning": "`zero run --autotuning run SCRIPT`, or deepspeed --autotuning, tries configurations with the script",
    "checkpoint": UNIVERSAL,
    "comm": "torch.distributed does it: it has the process group that init_distributed makes",
    "compile": COMPILE,
    "compression": COMPRESSION,
    "default_inference_config": INFERENCE,
    "elasticity": "torchrun restarts ranks (`zero run --max_restarts`); checkpoints load on any number of them",
    "inference": INFERENCE,
    "io": WRITERS,
    "launcher": LAUNCHER,
    "linear": "it is not implemented; use peft for LoRA, and a quantised base",
    "model_implementations": INFERENCE,
    "module_inject": INFERENCE,
    "module_inject.auto_ep": EXPERTS,
    "module_inject.auto_tp": TENSORS,
    "module_inject.layers": TENSORS,
    "module_inject.set_autotp_mode": TENSORS,
    "module_inject.tp": TENSORS,
    "moe": EXPERTS,
    "nebula": WRITERS,
    "nvme": ASYNC_IO,
    "ops": KERNELS,
    "ops.aio": ASYNC_IO,
    "ops.gds": ASYNC_IO,
    "ops.op_builder": "the engine loads its own libraries; `zero doctor` shows them",
    "ops.random_ltd": "random layer drop is not implemented",
    "ops.sparse_attention": "sparse attention is not implemented; use torch.nn.attention.flex_attention",
    "profiling": "the flops profiler and engine.trace have the timeline",
    "record_tp_model_init_args": TENSORS,
    "runtime": STAGES,
    "runtime.activation_checkpointing": "torch.utils.checkpoint and deepspeed.checkpointing.checkpoint do it",
    "runtime.bf16_optimizer": "set bf16 in the configuration",
    "runtime.checkpoint_engine": WRITERS,
    "runtime.comm": ONE_BIT,
    "runtime.compiler": COMPILE,
    "runtime.config": CONFIG,
    "runtime.data_pipeline": "the data efficiency library is not implemented; hand a sampler to the loader",
    "runtime.data_pipeline.data_routing": "random layer drop is not implemented; leave tokens out in the model",
    "runtime.domino": TENSORS,
    "runtime.eigenvalue": COMPRESSION,
    "runtime.fp16": "set fp16 in the configuration",
    "runtime.fp16.loss_scaler": SCALER,
    "runtime.fp16.onebit": ONE_BIT,
    "runtime.hybrid_engine": ROLLOUTS,
    "runtime.model_checkpointing": WRITERS,
    "runtime.pipe": PIPELINES,
    "runtime.quantize": COMPRESSION,
    "runtime.rollout": ROLLOUTS,
    "runtime.sequence_parallel": SEQUENCES,
    "runtime.sequence_parallel.ulysses_sp.SequenceTiled": SLICES,
    "runtime.sequence_parallel.ulysses_sp.Tiled": SLICES,
    "runtime.sequence_parallel.ulysses_sp.sequence_tiled": SLICES,
    "runtime.sparse_tensor": "gradients are reduced dense; nn.Embedding(sparse=True) is not needed",
    "runtime.state_dict_factory": INFERENCE,
    "runtime.swap_tensor": SWAPPERS,
    "runtime.tensor_parallel": TENSORS,
    "runtime.torch_autocast": "set torch_autocast in the configuration, or use torch.autocast around the forward",
    "runtime.weight_quantizer": COMPRESSION,
    "runtime.zero.leaf_module_config": "utils.set_z3_leaf_modules names leaf modules",
    "runtime.zero.linear": "torch.nn.functional.linear and nn.Linear need no replacement here",
    "runtime.zero.partition_parameters.MultipleAllGatherHandles": "the engine waits for its own transfers",
    "sequence": SEQUENCES,
    "set_autotp_mode": TENSORS,
    "tp_model_init": TENSORS,
    "utils.comms_logging": TIMERS,
    "utils.config": CONFIG,
    "utils.groups.get_tensor": TENSORS,
    "utils.groups.set_tensor": TENSORS,
    "utils.mixed_precision_linkage": "masters are found by safe_get_full_fp32_param",
    "utils.numa": "`zero run --bind_cores_to_rank` binds ranks to their cores",
    "utils.pin_memory": "torch's Tensor.pin_memory does it, and the engine pins its own",
    "utils.tensor_fragment": "the safe_get_ and safe_set_ functions find a parameter's values",
    "utils.timer": TIMERS,
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint has the whole weights",
    "utils.zero_to_torch": "get_fp32_state_dict_from_zero_checkpoint has the whole weights",
}

# Base classes of unavailable classes, since clients use these classes in `isinstance` and `except`.
BASES: dict[str, type] = {
    **{name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and name.endswith("Error")},
    **{"Enum": enum.Enum, "Exception": Exception, "Function": torch.autograd.Function},
    **{"Module": nn.Module, "Optimizer": torch.optim.Optimizer},
}

# Methods that are called on the class, without an object.
METHODS: dict[str, tuple[str, ...]] = {
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": ("register_with_transformers",)
}


def refused(name: str, instead: str) -> NotImplementedError:
    """The error for a use. `name`: DeepSpeed's dotted name; `instead`: what a user can do."""
    return NotImplementedError(f"deepspeed.{name}: not available in zero-infinity; {instead}")


def missing_function(name: str, instead: str) -> Callable[..., Any]:
    """A function that raises NotImplementedError when it is called; same arguments as `refused`."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise refused(name, instead)

    home, _, function.__name__ = name.rpartition(".")
    function.__qualname__, function.__module__ = function.__name__, f"deepspeed.{home}"
    function.__doc__ = f"Not available: {instead}."
    return function


def missing_class(name: str, instead: str, base: type = object) -> Any:
    """A class that works as a base class and in `isinstance`, but raises when an object of it is made.

    If it derives from an exception, it is an ordinary exception, which is never raised here but may be in `except`.
    `base`: its base class, if clients rely on it.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(name, instead)

    home, _, own = name.rpartition(".")
    body: dict[str, Any] = {"__doc__": f"Not available: {instead}.", "__module__": f"deepspeed.{home}"}
    if not issubclass(base, BaseException):
        body["__new__"] = __new__
    return types.new_class(own, (base,), {}, lambda namespace: namespace.update(body))


def unavailable(name: str, base: type | None) -> Any:
    """The replacement of a name: a function, or a class with this base.

    `name`: below `deepspeed`; `base`: None: it is a function.
    """
    instead = INSTEAD[max((begin for begin in INSTEAD if name.startswith(begin)), key=len)]
    if base is None:
        return missing_function(name, instead)
    made = missing_class(name, instead, base)
    called = ("apply",) if issubclass(base, torch.autograd.Function) else ()
    for method in METHODS.get(name, called):
        setattr(made, method, missing_function(f"{name}.{method}", instead))
    return made
