"""`zero.initialize`: DeepSpeed's entry point and its signature."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offload.accelerator import compute_device
from offload.errors import ConfigError, explain_file_limit
from zero import checkpointing
from zero.assembly.log import NOTICE, set_log_level, show_log
from zero.config import Config, load_config
from zero.config.auto_values import Facts, auto_lines, read_facts, resolve_auto
from zero.config.precision_block import DTYPES
from zero.config.sources import config_argument
from zero.dist import world
from zero.dist.initialization import join_or_stay_alone
from zero.engine.engine import ZeroEngine
from zero.engine.pipeline_engine import PipelineEngine, open_stages
from zero.engine.quantization import quantize
from zero.models.pipeline_module import PipelineModule
from zero.optim.lr_scheduler import check_scheduler
from zero.optim.make_rule import make_trained_parameters
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import TrainedParameters
from zero.params.initialisation import pause_init, refuse_without_values
from zero.store.collectives import Collectives
from zero.store.factory import open_collectives
from zero.store.pipeline_collectives import PipelineCollectives

logger = logging.getLogger("zero")

PIPELINE_ATTRIBUTES = ("forward_funcs", "_layer_specs", "_topo")  # Attributes of DeepSpeed's PipelineModule.


@explain_file_limit("initialize")
def initialize(  # noqa: PLR0913 - the signature is DeepSpeed's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | dict[str, Any] | Config | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | dict[str, Any] | None = None,
) -> tuple[ZeroEngine, ZeroOptimizer | None, DataLoader[Any] | None, Any]:
    """Wrap a model for training with its weights and states on the configured tiers.

    Args:
        args: `args.zero_config` or `args.deepspeed_config` names the config file when `config` is None; see
            `zero.add_config_arguments`.
        model: the module to train, built anywhere: under `zero.Init` or in memory.
        optimizer: a fresh one, of any class that updates parameters one by one; None takes `optimizer` from the config.
        model_parameters: parameters or param groups to train; None: all that require gradients.
        training_data: a dataset; a loader of this rank's micro-batches is made from it.
        lr_scheduler: an object with `step()`, or a callable that gets the optimizer and returns one; it overrides the
            `scheduler` of the config.
        distributed_port: the port of rank 0 if MASTER_PORT is not set.
        mpu: Megatron's or a similar object; its sizes but that of data parallelism must be 1.
        dist_init_required: False: torch.distributed is not initialised here; else a process that a launcher has started
            joins the other ranks, and a process without a launcher gets a group of one.
        collate_fn: for the loader.
        config: path or dict.
        mesh_param: not available: must be None.
        config_params: DeepSpeed's older name of `config`.

    Returns:
        (engine, optimizer, loader, lr_scheduler); those that were not asked for are None.

    Raises:
        ConfigError: every problem of the configuration at once.
        BudgetError: the plan does not fit; nothing was allocated.
        StorageError: the swap space cannot be reserved, or this process may open no more files.
    """
    if model is None:
        raise ConfigError("initialize: model is missing")
    pipeline = model if isinstance(model, PipelineModule) else None
    if pipeline is None:
        _refuse_pipelines(model)
    refuse_without_values(model)
    if mesh_param is not None:
        raise ConfigError("initialize: mesh_param is not available; leave it out")
    if pipeline is not None and mpu is not None:
        raise ConfigError("initialize: mpu: expected None with a PipelineModule, which has its own; leave it out")
    world.check_mpu(mpu, "initialize", *world.SAME_SAMPLE_SIZES)
    check_scheduler(lr_scheduler)
    show_log()
    if dist_init_required is not False:
        join_or_stay_alone(distributed_port)
    world.check_data_parallel(mpu)
    replicas = None if pipeline is None else pipeline.data_place[1]
    loaded = _read_config(args, config if config is not None else config_params, replicas)
    loaded = _without_autos(loaded, read_facts(model, optimizer, training_data))
    refuse_local_storage(loaded)
    trained = make_trained_parameters(optimizer, model_parameters, model, loaded)
    _quantize(model, loaded, trained)
    device = compute_device()
    stages = None if pipeline is None else open_stages(pipeline, loaded, device)
    engine = _open_engine(model, trained, loaded, device, stages, lr_scheduler)
    is_configured = loaded.origin("activation_checkpointing") == "user"
    checkpointing.use_engine_activations(engine.activations, configured=is_configured)
    engine.run.collate_fn = collate_fn
    if pipeline is not None and stages is not None:
        # Not a ZeroEngine, but with its names; it refuses forward, backward and step, as DeepSpeed's engine does.
        engine = cast(ZeroEngine, PipelineEngine(engine, pipeline, stages))
    if training_data is not None:
        load = engine.data_in_order if isinstance(engine, PipelineEngine) else engine.deepspeed_io
        engine.run.training_dataloader = load(training_data)
    return engine, engine.updater, engine.training_dataloader, engine.lr_scheduler


def _open_engine(
    model: nn.Module,
    trained: TrainedParameters | None,
    loaded: Config,
    device: torch.device,
    stages: PipelineCollectives | None,
    lr_scheduler: Any,
) -> ZeroEngine:
    collectives: Collectives | None = stages
    try:
        collectives = open_collectives(loaded, device, stages)
        with pause_init():
            return ZeroEngine(model, trained, loaded, device, collectives, lr_scheduler)
    except BaseException as error:  # the other ranks wait for this one: closing passes them the error
        for opened in (collectives, stages):
            if opened is not None:
                opened.close(error)
        raise


def refuse_local_storage(config: Config) -> None:
    """Raise ConfigError if each node is to write to its own disk, and there are several."""
    ranks = world.ranks_per_node()
    if config.checkpoint.use_node_local_storage and ranks is not None and ranks < world.world_size():
        raise ConfigError(
            f"checkpoint.use_node_local_storage: expected false for {world.world_size()} ranks, {ranks} of them here: "
            "a checkpoint is one folder that all nodes must see; set it to false (transformers sets it for "
            "save_on_each_node)"
        )


def _quantize(model: nn.Module, config: Config, trained: TrainedParameters | None) -> None:
    """Quantize weights as `weight_quantization` asks; before the plan is made, which counts the codes."""
    rules = {} if config.weight_quantization is None else config.weight_quantization.rules
    if rules:
        ours = {id(p) for group in (trained.groups if trained else ()) for p in group["params"]}
        quantize(model, rules, lambda parameter: id(parameter) in ours)


def _read_config(
    args: Any, source: str | os.PathLike[str] | dict[str, Any] | Config | None, world_size: int | None = None
) -> Config:
    """Load the configuration. `world_size`: number of parts that the data is split into; None: one per rank."""
    if source is None:
        source = config_argument(args)
    if source is None:
        raise ConfigError(
            "initialize: config is missing; pass config= (a path or a dict), or args with zero_config or "
            "deepspeed_config"
        )
    loaded = load_config(source, world_size=world_size)
    set_log_level(loaded)
    if loaded.inactive:
        logger.log(
            NOTICE, "zero: these keys have no effect: %s; `zero config show` says why", ", ".join(loaded.inactive)
        )
        logger.info("why these keys have no effect: %s", ", ".join(loaded.inactive_with_reasons))
    if loaded.ignored:
        logger.warning("unknown keys that were ignored: %s", "; ".join(loaded.ignored))
    for line in loaded.deprecated:
        logger.info("deprecated: %s", line)
    return loaded


def _without_autos(loaded: Config, facts: Facts) -> Config:
    """The configuration with a value for each "auto"; each value is logged once."""
    resolved = resolve_auto(loaded, facts)
    for line in auto_lines(resolved):
        logger.info("%s", line)
    wish = resolved.data_types.grad_accum_dtype
    if wish is not None and DTYPES[wish] != resolved.accumulation_dtype:
        logger.warning(
            "data_types.grad_accum_dtype: %s is only used with %s.enabled; gradients are accumulated in fp32",
            wish,
            wish,
        )
    return resolved


def _refuse_pipelines(model: nn.Module) -> None:
    """Raise ConfigError for DeepSpeed's PipelineModule, or for a class that imitates it."""
    named = any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__)
    if named or all(hasattr(model, mark) for mark in PIPELINE_ATTRIBUTES):
        raise ConfigError(
            f"initialize: model: {type(model).__name__} is DeepSpeed's PipelineModule or similar to it; make a "
            "zero.pipe.PipelineModule of the same layers, or an nn.Sequential (with ZeRO it does not have to fit on "
            "one device)"
        )
