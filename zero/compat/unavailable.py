"""Names of DeepSpeed that this library lacks: they can be imported, and their use raises an error with advice."""

from __future__ import annotations

import builtins
import enum
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

TENSORS = "tensor parallelism is not implemented; stage 3 shards weights over the same ranks instead"
SEQUENCES = "sequence parallelism is not implemented; use torch.distributed.tensor.experimental.context_parallel"
SEQUENCE_SLICES = "use torch.utils.checkpoint around each slice of the sequence, or TiledMLP for a module"
PIPELINES = (
    "the schedules are those of torch.distributed.pipelining; use zero.pipe.PipelineModule, and pipeline.schedule "
    "to choose one"
)
EXPERTS = (
    "experts are not distributed over ranks; moe.layer.MoE has all experts on each rank, and of a model's own experts "
    "(in a ModuleList, or packed as in transformers) only those that are called are fetched"
)
COMPRESSION = (
    "compression training is not implemented; quantise the base with bitsandbytes or torchao before training, or "
    "the result afterwards"
)
ONE_BIT = "1-bit optimizers are not implemented; use AdamW, and communication_data_type for less traffic"
KERNELS = (
    "DeepSpeed's kernels are not part of zero-infinity; use torch's scaled_dot_product_attention and torch.compile"
)
INFERENCE = "inference kernels are not implemented; deepspeed.init_inference streams a model that is larger than memory"
ROLLOUTS = "use engine.generate() for rollouts; hybrid_engine in the configuration keeps weights on the device for them"
UNIVERSAL = "it is not needed: a checkpoint loads as it is at any stage, on any device and number of ranks"
SWAPPERS = (
    "DeepSpeed's swappers are not part of zero-infinity; use zero_optimization.offload_param and offload_optimizer"
)
ASYNC_IO = (
    "use AsyncIOBuilder().load().aio_handle(...) for the engine's I/O, and `zero doctor --probe` to measure a disk"
)
COLLECTIVES = (
    "collectives are not timed; engine.log_summary() counts those of the engine by purpose, and torch.profiler times "
    "all of them"
)
COMPILE = "DeepCompile is not available; use engine.compile(), which calls torch.compile on the model"
TIMERS = "use engine.statistics(), which has the same counts"
REDUCED = (
    "backward reduces the gradients itself; read them with safe_get_full_grad, and use torch.distributed for tensors "
    "of your own"
)
INTERNAL = "it is an inner step of DeepSpeed's own engine, and leaving it out changes nothing here"
SCALER = "the engine scales the loss itself; set fp16 in the configuration, and read optimizer.loss_scale"
WRITERS = "DeepSpeed's checkpoint writers are not part of zero-infinity; use engine.save_checkpoint"
CONFIG = "use DeepSpeedConfig(...), which has the blocks of the configuration as attributes"
STAGES = (
    "DeepSpeed's internals of sharding are not part of zero-infinity; the engine shards behind the same public calls"
)
ZENFLOW = (
    "ZenFlow changes the numbers and is not available; updates on the CPU run in the background here, with exact "
    "results"
)
OFFLOADED = (
    'set activation_checkpointing.activation_device to "cpu" or "nvme": inputs of checkpoints go there, and with '
    "activation_offloading all that autograd saves"
)
LAUNCHER = "use `zero run`, which starts ranks on one node or several; see `zero run --help`"

# Prefix of a name below `deepspeed` -> what a user can do instead; the longest matching prefix counts.
INSTEAD: dict[str, str] = {
    "": "zero-infinity has no replacement for it; leave it out, or use torch",
    "accelerator": "use get_accelerator(), which returns the accelerator of this process; ZERO_DEVICE chooses it",
    "autotuning": "use `zero run --autotuning run SCRIPT`, or deepspeed --autotuning, which tries configurations with "
    "the script",
    "checkpoint": UNIVERSAL,
    "comm": "use torch.distributed, which has the process group that init_distributed makes",
    **dict.fromkeys(("comm.comm.get_comm", "comm.comm.get_logged", "comm.comm.has_comm_data"), COLLECTIVES),
    **dict.fromkeys(("comm.comm.reset_log", "comm.comm.timed_op"), COLLECTIVES),
    "compile": COMPILE,
    "compression": COMPRESSION,
    "datastates": WRITERS,
    "default_inference_config": INFERENCE,
    "elasticity": "use `zero run --max_restarts`, with which torchrun restarts ranks; checkpoints load on any number "
    "of ranks",
    "inference": INFERENCE,
    "io": WRITERS,
    "launcher": LAUNCHER,
    "linear": "it is not implemented; use peft for LoRA, and a quantised base",
    "model_implementations": INFERENCE,
    "module_inject": INFERENCE,
    "module_inject.auto_ep": EXPERTS,
    "module_inject.auto_tp": TENSORS,
    "module_inject.layers": TENSORS,
    "module_inject.tp": TENSORS,
    "moe": EXPERTS,
    "monitor": "use the blocks tensorboard, wandb, csv_monitor and comet of the configuration, and MonitorMaster",
    "nebula": WRITERS,
    "nvme": ASYNC_IO,
    "ops": KERNELS,
    "ops.adam.zenflow": ZENFLOW,
    "ops.op_builder": "the engine loads its own libraries; `zero doctor` shows them",
    "ops.random_ltd": "random layer drop is not implemented",
    "ops.sparse_attention": "sparse attention is not implemented; use torch.nn.attention.flex_attention",
    "profiling": "use the flops profiler, or engine.trace for a timeline",
    "runtime": STAGES,
    "runtime.activation_checkpointing": "use torch.utils.checkpoint or deepspeed.checkpointing.checkpoint",
    "runtime.activation_checkpointing.offload_activations": OFFLOADED,
    "runtime.bf16_optimizer": "set bf16 in the configuration",
    "runtime.checkpoint_engine": WRITERS,
    "runtime.chunked_cross_entropy": SEQUENCE_SLICES,
    "runtime.comm": ONE_BIT,
    "runtime.comm.coalesced_collectives.all_to_all": "quantised collectives change the results and are not available; "
    "communication_data_type moves fewer bytes",
    "runtime.comm.coalesced_collectives.reduce_scatter": "use torch.distributed.reduce_scatter_tensor for each tensor; "
    "the engine reduces gradients itself",
    "runtime.compression": ONE_BIT,
    "runtime.compiler": COMPILE,
    "runtime.config": CONFIG,
    "runtime.data_pipeline": "the data efficiency library is not implemented; pass a sampler to the data loader",
    "runtime.data_pipeline.data_routing": "random layer drop is not implemented; drop tokens in the model itself",
    "runtime.domino": TENSORS,
    "runtime.eigenvalue": COMPRESSION,
    "runtime.fp16": "set fp16 in the configuration",
    "runtime.fp16.loss_scaler": SCALER,
    "runtime.fp16.onebit": ONE_BIT,
    "runtime.hybrid_engine": ROLLOUTS,
    "runtime.lr_schedules": 'choose the schedule in the configuration: {"scheduler": {"type": ..., "params": {...}}}',
    "runtime.model_checkpointing": WRITERS,
    "runtime.pipe": PIPELINES,
    "runtime.quantize": COMPRESSION,
    "runtime.rollout": ROLLOUTS,
    "runtime.sequence_parallel": SEQUENCES,
    "runtime.sequence_parallel.ulysses_sp.SequenceTiled": SEQUENCE_SLICES,
    "runtime.sequence_parallel.ulysses_sp.Tiled": SEQUENCE_SLICES,
    "runtime.sequence_parallel.ulysses_sp.sequence_tiled": SEQUENCE_SLICES,
    "runtime.sparse_tensor": "gradients are reduced dense; use nn.Embedding without sparse=True",
    "runtime.state_dict_factory": INFERENCE,
    "runtime.superoffload": "set offload_optimizer: updates on the CPU always run in the background here",
    "runtime.swap_tensor": SWAPPERS,
    "runtime.tensor_parallel": TENSORS,
    "runtime.torch_autocast": "set torch_autocast in the configuration, or use torch.autocast around the forward",
    "runtime.weight_quantizer": COMPRESSION,
    "runtime.zenflow": ZENFLOW,
    "runtime.zero.leaf_module_config": "use utils.set_z3_leaf_modules to name leaf modules",
    "runtime.zero.linear": "torch.nn.functional.linear and nn.Linear need no replacement here",
    "runtime.zero.mics": "set zero_optimization.mics_shard_size in the configuration",
    "runtime.zero.muon": 'set optimizer.type to "Muon" in the configuration',
    "runtime.zero.partition_parameters.MultipleAllGatherHandles": "leave it out; the engine waits for its own "
    "transfers",
    "sequence": SEQUENCES,
    "tp_model_init": TENSORS,
    "utils.comms_logging": COLLECTIVES,
    "utils.config": CONFIG,
    "utils.groups.get_tensor": TENSORS,
    "utils.groups.set_tensor": TENSORS,
    "utils.mixed_precision_linkage": "use safe_get_full_fp32_param to read fp32 master weights",
    "utils.numa": "use `zero run --bind_cores_to_rank` to bind ranks to cores",
    "utils.pin_memory": "use torch's Tensor.pin_memory; the engine pins its own memory",
    "utils.tensor_fragment": "use the safe_get_ and safe_set_ functions to read and write a parameter's values",
    "utils.timer": "use SynchronizedWallClockTimer, which runs on torch's events on a GPU",
    "utils.zero_to_fp32": "use get_fp32_state_dict_from_zero_checkpoint to get the whole weights",
    "utils.zero_to_torch": "use get_fp32_state_dict_from_zero_checkpoint to get the whole weights",
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


def unavailable_error(name: str, instead: str) -> NotImplementedError:
    """The error for a use. `name`: DeepSpeed's dotted name; `instead`: what a user can do."""
    return NotImplementedError(f"deepspeed.{name}: not available in zero-infinity; {instead}")


def missing_function(name: str, instead: str) -> Callable[..., Any]:
    """A function that raises NotImplementedError when it is called; same arguments as `unavailable_error`."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise unavailable_error(name, instead)

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
        raise unavailable_error(name, instead)

    home, _, own = name.rpartition(".")
    body: dict[str, Any] = {"__doc__": f"Not available: {instead}.", "__module__": f"deepspeed.{home}"}
    if not issubclass(base, BaseException):
        body["__new__"] = __new__
    return types.new_class(own, (base,), {}, lambda namespace: namespace.update(body))


def instead_of(name: str) -> str:
    """What to do instead of a name below `deepspeed`."""
    return INSTEAD[max((begin for begin in INSTEAD if name.startswith(begin)), key=len)]


def unavailable(name: str, base: type | None) -> Any:
    """The replacement of a name: a function, or a class with this base.

    `name`: below `deepspeed`; `base`: None: it is a function.
    """
    instead = instead_of(name)
    if base is None:
        return missing_function(name, instead)
    kind = missing_class(name, instead, base)
    called = ("apply",) if issubclass(base, torch.autograd.Function) else ()
    for method in METHODS.get(name, called):
        setattr(kind, method, missing_function(f"{name}.{method}", instead))
    return kind
