"""The names that users of DeepSpeed call on an engine, and which collaborator answers each."""

from __future__ import annotations

from typing import Any

from zero.assembly.accumulation import Accumulation
from zero.assembly.loss_scaling import LossScaling
from zero.assembly.model_changes import ModelChanges
from zero.assembly.offload_states import OffloadStates
from zero.assembly.run import Run
from zero.assembly.steps import Steps
from zero.checkpoint.background import CheckpointState
from zero.checkpoint.load import LoadCheckpoints
from zero.checkpoint.saving import SaveCheckpoints
from zero.checkpoint.weights_out import ExportWeights
from zero.compat.engine_getters import ConfigGetters
from zero.config import Config
from zero.data.loaders import Loaders
from zero.engine.client_calls import ClientCalls
from zero.engine.generation import Generation
from zero.engine.reports import Reports
from zero.engine.snapshots import SnapshotCalls
from zero.engine.values import Values
from zero.optim.optimizer import ZeroOptimizer


class answered_by:
    """A name of the engine that one of its collaborators has, under the same name.

    Seen on the class it is the collaborator's own function or property, so `help` and `inspect` tell about it.

    Args:
        part: the engine's attribute that holds the collaborator.
        kind: its class.
    """

    def __init__(self, part: str, kind: type) -> None:
        self._part, self._kind = part, kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return getattr(self._kind, self._name, self)
        return getattr(getattr(engine, self._part), self._name)

    def __set__(self, engine: Any, value: Any) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class EngineNames(ConfigGetters):
    """The engine has these; what it does itself stands in `ZeroEngine`."""

    run: Run

    @property
    def _config(self) -> Config:  # type: ignore[override]
        return self.run.config

    @property
    def updater(self) -> ZeroOptimizer | None:
        """The optimizer; None: nothing trains."""
        return self.run.updater

    # ---- how far the training is, and what users set on the engine --------------------------------
    device = answered_by("run", Run)
    exchange = answered_by("run", Run)
    activations = answered_by("run", Run)
    scaler = answered_by("run", Run)
    lr_scheduler = answered_by("run", Run)
    global_steps = answered_by("run", Run)
    global_samples = answered_by("run", Run)
    micro_steps = answered_by("run", Run)
    skipped_steps = answered_by("run", Run)
    collate_fn = answered_by("run", Run)
    training_dataloader = answered_by("run", Run)
    data_position = answered_by("run", Run)

    # ---- micro-batches and steps ------------------------------------------------------------------
    is_gradient_accumulation_boundary = answered_by("accumulation", Accumulation)
    set_gradient_accumulation_boundary = answered_by("accumulation", Accumulation)
    no_sync = answered_by("accumulation", Accumulation)
    scale = answered_by("scaling", LossScaling)
    zero_grad = answered_by("steps", Steps)
    was_step_applied = answered_by("steps", Steps)
    synchronize = answered_by("steps", Steps)
    current = answered_by("steps", Steps)
    values_of = answered_by("steps", Steps)
    offload_states = answered_by("offloading", OffloadStates)
    reload_states = answered_by("offloading", OffloadStates)
    offloaded_states = answered_by("offloading", OffloadStates)
    state_devices = answered_by("offloading", OffloadStates)
    replan = answered_by("model_changes", ModelChanges)
    generation = answered_by("generations", Generation)
    deepspeed_io = answered_by("loaders", Loaders)

    # ---- values, checkpoints, snapshots -----------------------------------------------------------
    full_parameter = answered_by("values", Values)
    full_master = answered_by("values", Values)
    full_state = answered_by("values", Values)
    named_full_parameters = answered_by("values", Values)
    save_checkpoint = answered_by("saves", SaveCheckpoints)
    checkpoint_tools = answered_by("saves", SaveCheckpoints)
    files = answered_by("saves", SaveCheckpoints)
    load_checkpoint = answered_by("loads", LoadCheckpoints)
    checkpoint_pending = answered_by("checkpoint_state", CheckpointState)
    wait_for_checkpoint = answered_by("checkpoint_state", CheckpointState)
    half_loaded = answered_by("checkpoint_state", CheckpointState)
    save_16bit_model = answered_by("weights_out", ExportWeights)
    save_fp16_model = answered_by("weights_out", ExportWeights)
    save_fp32_model = answered_by("weights_out", ExportWeights)
    module_state_dict = answered_by("weights_out", ExportWeights)
    _zero3_consolidated_16bit_state_dict = answered_by("weights_out", ExportWeights)
    _consolidated_16bit_state_dict = answered_by("weights_out", ExportWeights)
    save_snapshot = answered_by("snapshots", SnapshotCalls)
    load_snapshot = answered_by("snapshots", SnapshotCalls)

    # ---- reports ----------------------------------------------------------------------------------
    monitor = answered_by("reports", Reports)
    statistics = answered_by("reports", Reports)
    seconds_so_far = answered_by("reports", Reports)
    log_summary = answered_by("reports", Reports)
    flops_profiler = answered_by("reports", Reports)
    flops_profiler_enabled = answered_by("reports", Reports)
    get_wall_clock_timers = answered_by("reports", Reports)
    wall_clock_breakdown = answered_by("reports", Reports)
    memory_breakdown = answered_by("reports", Reports)

    # ---- what clients ask for besides -------------------------------------------------------------
    config = answered_by("calls", ClientCalls)
    optimizer = answered_by("calls", ClientCalls)
    parameter_offload = answered_by("calls", ClientCalls)
    hooks_for_optimizer = answered_by("calls", ClientCalls)
    set_train_batch_size = answered_by("calls", ClientCalls)
    set_train_micro_batch_size = answered_by("calls", ClientCalls)
    set_gradient_accumulation_steps = answered_by("calls", ClientCalls)
    get_batch_info = answered_by("calls", ClientCalls)
    get_global_grad_norm = answered_by("calls", ClientCalls)
    set_lr = answered_by("calls", ClientCalls)
    get_lr = answered_by("calls", ClientCalls)
    get_mom = answered_by("calls", ClientCalls)
    empty_partition_cache = answered_by("calls", ClientCalls)
    compile = answered_by("calls", ClientCalls)
    is_compiled = answered_by("calls", ClientCalls)
