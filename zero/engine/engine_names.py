"""The names that users of DeepSpeed call on an engine, and the collaborator that has each of them."""

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
from zero.data.forward_schedules import ForwardSchedules
from zero.data.loaders import Loaders
from zero.engine.averaged_weights import AveragedWeights
from zero.engine.client_calls import ClientCalls
from zero.engine.generation import Generation
from zero.engine.reports import Reports
from zero.engine.snapshots import SnapshotCalls
from zero.engine.values import Values
from zero.optim.optimizer import ZeroOptimizer


class answered_by:
    """Forwards a name of the engine to one of its collaborators, which has the same name.

    On the class it returns the collaborator's function or property, so that `help` and `inspect` describe that one.

    `part`: the engine's attribute that holds the collaborator; `kind`: its class.
    """

    def __init__(self, part: str, kind: type, name: str) -> None:
        self._part, self._kind, self._name = part, kind, name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return getattr(self._kind, self._name, self)
        return getattr(getattr(engine, self._part), self._name)

    def __set__(self, engine: Any, value: Any) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class EngineNames(ConfigGetters):
    """The forwarded names of the engine; `ZeroEngine` has the methods that are its own."""

    run: Run

    @property
    def _config(self) -> Config:  # type: ignore[override]
        return self.run.config

    @property
    def updater(self) -> ZeroOptimizer | None:
        return self.run.updater


# (the engine's attribute that holds the collaborator, its class) -> the engine's names that are forwarded to it.
ANSWERS: dict[tuple[str, type], str] = {
    ("run", Run): """
        device exchange activations scaler lr_scheduler global_steps global_samples skipped_steps collate_fn
        training_dataloader data_position
    """,
    ("accumulation", Accumulation): """
        micro_steps is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync
    """,
    ("scaling", LossScaling): "scale",
    ("steps", Steps): "zero_grad was_step_applied synchronize current values_of",
    ("offloading", OffloadStates): "offload_states reload_states offloaded_states state_devices",
    ("model_changes", ModelChanges): "replan",
    ("averages", AveragedWeights): "averaged_weights",
    ("generations", Generation): "generate generation",
    ("loaders", Loaders): "deepspeed_io",
    ("schedules", ForwardSchedules): "curriculum_scheduler_legacy progressive_layer_drop",
    ("values", Values): "full_parameter full_master full_state named_full_parameters",
    ("saves", SaveCheckpoints): "save_checkpoint checkpoint_tools files",
    ("loads", LoadCheckpoints): "load_checkpoint",
    ("checkpoint_state", CheckpointState): "checkpoint_pending wait_for_checkpoint half_loaded",
    ("weights_out", ExportWeights): """
        save_16bit_model save_fp16_model save_fp32_model module_state_dict _zero3_consolidated_16bit_state_dict
        _consolidated_16bit_state_dict
    """,
    ("snapshots", SnapshotCalls): "save_snapshot load_snapshot",
    ("reports", Reports): """
        monitor statistics seconds_so_far log_summary flops_profiler flops_profiler_enabled get_wall_clock_timers
        wall_clock_breakdown memory_breakdown
    """,
    ("calls", ClientCalls): """
        config optimizer parameter_offload hooks_for_optimizer set_train_batch_size set_train_micro_batch_size
        set_gradient_accumulation_steps get_batch_info get_global_grad_norm set_lr get_lr get_mom empty_partition_cache
        compile is_compiled
    """,
}

for (_part, _kind), _names in ANSWERS.items():
    for _name in _names.split():
        setattr(EngineNames, _name, answered_by(_part, _kind, _name))
