"""`deepspeed.initialize`: ours, with the behaviour and the attributes of the engine that DeepSpeed's clients need."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import zero
from offload.errors import ConfigError
from zero.compat import groups
from zero.compat.comm_log import use_block
from zero.compat.helpers import has_moe_layers
from zero.compat.logs import logger
from zero.compat.operators import VERSION
from zero.compat.to_fp32 import TOOLS
from zero.compat.unavailable import TIMERS, WRITERS, missing_function, refused
from zero.config import reading_as_deepspeed
from zero.engine.pipeline_engine import PipelineEngine
from zero.optim.optimizer import ZeroOptimizer
from zero.params.released import ReleasedAlias, name_of, save_released_as_empty, warn_of_empty_values
from zero.ranks import world
from zero.ranks.joining import init_distributed
from zero.utils import safe_set_full_fp32_param

SIGNATURE = inspect.signature(zero.initialize)


@functools.wraps(zero.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`zero.initialize` with the defaults of DeepSpeed; it initialises torch.distributed first if needed.

    Unknown top-level keys only cause a warning. Raises ConfigError: names all problems of the configuration at once.
    Raises BudgetError: the plan does not fit; nothing was allocated. Raises StateError: `dist_init_required` is False
    and there is no process group: each rank would train alone.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not dist.is_initialized():
        init_distributed(distributed_port=given["distributed_port"], dist_init_required=given["dist_init_required"])
    tell_local_rank(given["args"])
    say_who_answers()
    for name in ("config", "config_params"):
        given[name] = _without_idle_states(given[name], given["optimizer"])
    with reading_as_deepspeed():
        engine, optimizer, loader, scheduler = zero.initialize(**given)
    save_released_as_empty()
    lend_names(engine, given["optimizer"], given["mpu"])
    if (log := engine.run.config.comms_logger) is not None:
        use_block(log)
    return engine, optimizer, loader, scheduler


def _without_idle_states(config: Any, optimizer: Any) -> Any:
    """The config without settings for optimizer states, if it names no optimizer and none was passed; else unchanged.

    Clients edit their trainer's configuration for a model that is not trained: they set an optimizer of type None, or
    stage 0 but leave offload_optimizer in (TRL to 1.8). DeepSpeed makes no states then; stage 0 would be refused here.
    """
    if optimizer is not None or not isinstance(config, Mapping):
        return config
    named = config.get("optimizer")
    if named is not None and (not isinstance(named, Mapping) or named.get("type", "") is not None):
        return config
    kept = {key: value for key, value in config.items() if key != "optimizer"}
    block = kept.get("zero_optimization")
    if isinstance(block, Mapping) and block.get("stage") == 0:
        kept["zero_optimization"] = {key: value for key, value in block.items() if key != "offload_optimizer"}
    return kept


def say_who_answers() -> None:
    """Log DeepSpeed's line on the first rank, with a note that this is zero-infinity."""
    if world.rank() == 0:
        told = f"DeepSpeed info: version={VERSION}, git-hash=none, git-branch=none"
        logger.info("%s (this is zero-infinity %s, imported under the name deepspeed)", told, zero.__version__)


class EpochTimer:
    """DeepSpeed's `engine.tput_timer`: counts epochs that scripts report; `engine.statistics()` has the times."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def start(self) -> None:
        """Accepted."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Accepted."""


def tell_local_rank(args: Any) -> None:
    """Set `args.local_rank` as the environment says, if the script has that argument: launchers may not pass it.

    Raises ConfigError: the script was started with another number.
    """
    if not hasattr(args, "local_rank") or "LOCAL_RANK" not in os.environ:
        return
    given, ours = args.local_rank, world.local_rank()
    if isinstance(given, int) and given >= 0 and given != ours:
        raise ConfigError(f"initialize: args.local_rank: expected LOCAL_RANK of the environment, {ours}, got {given}")
    args.local_rank = ours


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


def lend_names(engine: Any, client_optimizer: Any = None, mpu: Any = None) -> None:
    """Give an engine DeepSpeed's attributes. `client_optimizer`, `mpu`: the arguments of `initialize`."""
    if isinstance(engine, PipelineEngine):
        mpu = engine.grid
    groups.use(mpu)

    def given(block: str, key: str) -> Any:
        return (engine.config.get(block) or {}).get(key)

    writer = {name: missing_function(f"checkpoint_engine.{name}", WRITERS) for name in ("save", "load", "commit")}
    names = {
        "_get_optimizer_ckpt_name": _optimizer_file,
        "allreduce_gradients": _nothing_to_reduce,
        "basic_optimizer": engine.updater,
        "checkpoint_engine": SimpleNamespace(**writer),
        "checkpoint_tools": TOOLS,
        "client_optimizer": client_optimizer,
        **({} if client_optimizer is None else {"optimizer_name": lambda: type(client_optimizer).__name__}),
        "clip_fp32_gradients": missing_function(
            "DeepSpeedEngine.clip_fp32_gradients", "step() clips to gradient_clipping from the configuration"
        ),
        "data_parallel_group": dist.group.WORLD if mpu is None else mpu.get_data_parallel_group(),
        "has_moe_layers": has_moe_layers(engine.module)[0],
        "hooks_for_optimizer": True,
        "load_module_state_dict": functools.partial(load_module_state_dict, engine),
        "mpu": mpu,
        "optimizer_params": lambda: given("optimizer", "params"),
        "param_names": {parameter: name for name, parameter in engine.module.named_parameters()},
        "scheduler_name": lambda: given("scheduler", "type"),
        "scheduler_params": lambda: given("scheduler", "params"),
        "sparse_tensor_module_names": set(),
        "timers": missing_function("DeepSpeedEngine.timers", TIMERS),
        "tput_timer": EpochTimer(),
    }
    for name, value in names.items():
        setattr(engine, name, value)
    if not engine.run.exchange.placement.alone:
        engine.module.register_state_dict_post_hook(_empty_where_released)
    if engine.updater is not None:
        engine.updater.__dict__["optimizer"] = engine.updater  # in DeepSpeed it is the wrapped optimizer
        engine.updater.__dict__["refresh_fp32_params"] = functools.partial(_refresh_masters, engine)


def _empty_where_released(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
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
    raise refused(
        "DeepSpeedEngine._get_optimizer_ckpt_name",
        "checkpoints of zero-infinity have no such file; use load_checkpoint",
    )


class _Shows(type):
    """Metaclass: `isinstance` checks for an attribute, not for a base class."""

    shows: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and hasattr(instance, cls.shows)


class DeepSpeedZeroOptimizer(metaclass=_Shows):
    """The optimizer of stages 1 and 2: it has the shards of the fp32 masters as an attribute."""

    shows = "single_partition_of_fp32_groups"


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Shows):
    """The optimizer of stage 3: it has the shards of the fp32 masters as an attribute."""

    shows = "fp32_partitioned_groups_flat"
