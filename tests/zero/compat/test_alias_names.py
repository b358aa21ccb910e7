"""Every path, attribute and gate by which clients find DeepSpeed is there, and what is not implemented says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from aliased import ROOT, code, said

import zero.compat.deepspeed as compat
from zero.compat.helpers import move_to_device
from zero.compat.operators import VERSION

Said = Callable[[str], str]
PATHS = [
    *("DeepSpeedEngine", "initialize", "zero.Init", "zero.GatheredParameters", "zero.register_external_parameter"),
    *("zero.TiledLinear", "zero.ZeroParamStatus", "zero.unregister_external_parameter", "init_distributed"),
    *("add_config_arguments", "init_inference", "InferenceEngine", "OnDevice", "log_dist", "logger", "checkpointing"),
    *("PipelineModule", "tp_model_init", "get_accelerator", "DeepSpeedConfig", "DeepSpeedHybridEngine", "__version__"),
    *("__version_major__", "__version_minor__", "__version_patch__", "__git_hash__", "__git_branch__"),
    *("version", "git_hash", "git_branch", "runtime.pipe.engine.DeepSpeedEngine"),
    *("runtime.engine.DeepSpeedEngine", "runtime.lr_schedules.VALID_LR_SCHEDULES", "runtime.lr_schedules.WarmupLR"),
    *("runtime.zero.Init", "runtime.zero.GatheredParameters", "runtime.zero.partition_parameters.ZeroParamStatus"),
    *("runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",),
    *("runtime.zero.partition_parameters._orig_torch_arange", "runtime.zero.partition_parameters.get_accelerator"),
    *("runtime.zero.partition_parameters.GatheredParameters", "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"),
    *("runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", "runtime.zero.stage3.unwrap_model_for_generation"),
    *("runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live", "runtime.zero.config.ZeroStageEnum"),
    *("runtime.zero.config.DeepSpeedZeroConfig", "runtime.zero.offload_config.OffloadDeviceEnum"),
    *("runtime.zero.offload_states.get_state_devices", "runtime.zero.offload_config.OffloadStateTypeEnum"),
    *("runtime.zero.utils.is_zero_param", "runtime.zero.tiling.TiledLinear", "runtime.zero.linear.zero3_linear_wrap"),
    *("runtime.fp16.fused_optimizer.FP16_Optimizer", "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"),
    *("runtime.bf16_optimizer.BF16_Optimizer", "runtime.config.DeepSpeedConfigError", "runtime.utils.move_to_device"),
    *("runtime.utils.see_memory_usage", "runtime.dataloader.RepeatingLoader", "runtime.dataloader.DeepSpeedDataLoader"),
    *("runtime.activation_checkpointing.checkpointing.checkpoint", "runtime.base_optimizer.ZeROOptimizer"),
    *("runtime.pipe.topology.PipeModelDataParallelTopology", "runtime.pipe.module.PipelineModule"),
    *("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", "runtime.hybrid_engine.DeepSpeedHybridEngine"),
    *("runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", "runtime.fp16.onebit.adam.OnebitAdam"),
    *("comm.is_initialized", "comm.init_distributed", "comm.get_rank", "comm.get_world_size", "comm.barrier"),
    *("comm.broadcast", "comm.all_gather", "comm.all_gather_into_tensor", "comm.all_reduce", "comm.new_group"),
    *("comm.inference_all_reduce", "comm.destroy_process_group", "comm.comm.init_distributed", "comm.ReduceOp"),
    *("accelerator.get_accelerator", "accelerator.is_current_accelerator_supported"),
    *("accelerator.real_accelerator.get_accelerator", "accelerator.abstract_accelerator.DeepSpeedAccelerator"),
    *("utils.logger", "utils.logging.logger", "utils.log_dist", "utils.set_z3_leaf_modules", "utils.is_initialized"),
    *("utils.groups._get_sequence_parallel_group", "utils.groups._get_sequence_parallel_rank"),
    *("utils.groups._get_sequence_parallel_world_size", "utils.groups._get_data_parallel_world_size"),
    *("utils.groups._get_expert_parallel_world_size", "utils.groups._get_expert_data_parallel_group"),
    *("utils.groups._get_expert_data_parallel_world_size", "utils.groups._get_expert_data_parallel_rank"),
    *("utils.zero_to_fp32.load_state_dict_from_zero_checkpoint", "utils.RepeatingLoader", "utils.OnDevice"),
    *("utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint", "utils.torch.required_torch_version"),
    *("utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict", "utils.nvtx.instrument_w_nvtx"),
    *("ops.adam.DeepSpeedCPUAdam", "ops.adam.FusedAdam", "ops.adam.cpu_adam.DeepSpeedCPUAdam"),
    *("utils.safe_get_full_grad", "utils.safe_get_full_fp32_param", "utils.safe_set_full_optimizer_state"),
    *("utils.tensor_fragment.safe_get_local_grad", "runtime.zero.parameter_offload.DeepSpeedZeRoOffload"),
    *("runtime.precision_config.DeepSpeedFP16Config", "runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("runtime.zero.partition_parameters.partitioned_param_data_shape", "runtime.config.ADAM_OPTIMIZER"),
    *("runtime.zero.config.DeepSpeedZeroOffloadParamConfig", "runtime.lr_schedules.WARMUP_MIN_LR"),
    *("runtime.lr_schedules.add_tuning_arguments", "runtime.lr_schedules.get_config_from_args"),
    *("runtime.lr_schedules.WARMUP_DECAY_LR", "monitor.csv_monitor.csvMonitor", "monitor.wandb.WandbMonitor"),
    *("monitor.config.DeepSpeedMonitorConfig", "runtime.precision_config.get_bfloat16_config"),
    *("ops.adagrad.DeepSpeedCPUAdagrad", "ops.lion.DeepSpeedCPULion", "ops.lion.fused_lion.FusedLion"),
    *("ops.aio.AsyncIOBuilder", "ops.__compatible_ops__", "ops.op_builder.CPUAdamBuilder", "ops.lamb.FusedLamb"),
    *(
        "ops.op_builder.AsyncIOBuilder.NAME",
        "ops.op_builder.all_ops.ALL_OPS",
        "ops.transformer.DeepSpeedTransformerLayer",
    ),
    *("checkpoint.utils.clone_tensors_for_torch_save", "checkpoint.constants.ZERO_STAGE", "checkpoint.ds_to_universal"),
    *("launcher.runner.DEEPSPEED_ENVIRONMENT_NAME", "launcher.runner.main", "git_version_info.torch_info"),
    *("git_version_info.version", "constants.TORCH_DISTRIBUTED_DEFAULT_PORT", "env_report.main"),
    *("pipe.PipelineModule", "pipe.LayerSpec", "moe.layer.MoE", "moe.sharded_moe.TopKGate"),
    *("moe.utils.split_params_into_different_moe_groups_for_optimizer", "compression.compress.init_compression"),
    *("profiling.flops_profiler.get_model_profile", "profiling.flops_profiler.profiler.FlopsProfiler"),
    *("monitor.monitor.MonitorMaster", "inference.engine.InferenceEngine", "inference.config.DeepSpeedInferenceConfig"),
    *("sequence.layer.DistributedAttention", "module_inject.replace_module", "elasticity.elastic_agent"),
    *("autotuning.Autotuner", "linear.OptimizedLinear"),
]
"""Below `deepspeed`: reached as attributes after a bare import, and imported from their module."""


@cache
def looked_up() -> dict[str, list[str]]:
    """What each path gave in one child per way: as attributes, and by an import of the module."""
    return {
        "attributes": json.loads(
            said(
                *code(f"""
                import json, deepspeed
                failed = []
                for path in {PATHS!r}:
                    there = deepspeed
                    try:
                        for name in path.split("."):
                            there = getattr(there, name)
                    except (AttributeError, ImportError) as error:
                        failed.append(f"{{path}}: {{error!r}}")
                print(json.dumps(failed))
                """)
            )
        ),
        "imports": json.loads(
            said(
                *code(f"""
                import json
                failed = []
                for path in {PATHS!r}:
                    home, _, name = f"deepspeed.{{path}}".rpartition(".")
                    if home == "deepspeed.ops.op_builder.AsyncIOBuilder":
                        home, name = "deepspeed.ops.op_builder", "AsyncIOBuilder"
                    try:
                        exec(f"from {{home}} import {{name}}")
                    except ImportError as error:
                        if home != "deepspeed.zero":  # DeepSpeed has it as an attribute only
                            failed.append(f"{{path}}: {{error!r}}")
                print(json.dumps(failed))
                """)
            )
        ),
    }


@pytest.mark.broad
@pytest.mark.parametrize("way", ["attributes", "imports"])
def test_every_path_of_the_table_is_there(way: str) -> None:
    assert looked_up()[way] == []


def test_an_unknown_name_is_an_attribute_error_so_hasattr_can_probe() -> None:
    assert said(*code("import deepspeed; print(hasattr(deepspeed, 'nothing'), hasattr(deepspeed.ops, 'nothing'))")) == (
        "False False"
    )


def test_the_gates_find_a_spec_and_metadata_of_that_name() -> None:
    found = said(
        *code("""
        import importlib.metadata, importlib.util
        from packaging.requirements import Requirement
        before = importlib.util.find_spec("deepspeed").origin
        version = importlib.metadata.version("deepspeed")
        import deepspeed
        assert importlib.util.find_spec("deepspeed").origin == before
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert importlib.metadata.metadata("deepspeed")["Version"] == version == deepspeed.__version__
        for gate in (">=0.9.3", ">=0.13.0", ">=0.14.5", ">=0.16.4", ">=0.18.2"):
            assert Requirement(f"deepspeed{gate}").specifier.contains(version), gate
        print(before, version)
        """)
    )
    assert found == f"{compat.ALIAS}/deepspeed/__init__.py {VERSION}"


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    (folder,) = Path(compat.ALIAS).glob("*.dist-info")
    assert folder.name == f"deepspeed-{VERSION}.dist-info"
    assert f"\nVersion: {VERSION}\n" in (folder / "METADATA").read_text(encoding="utf-8")


def test_importing_it_loads_neither_torch_nor_us_and_using_it_starts_nothing() -> None:
    loaded = said(
        *code("""
        import sys, deepspeed
        print([name for name in sys.modules if name.split(".")[0] in ("torch", "zero", "offload")])
        """)
    )
    assert loaded == "[]"
    started = said(
        *code("""
        import os, sys, threading
        from deepspeed import DeepSpeedEngine
        import deepspeed, torch
        import deepspeed.comm, deepspeed.accelerator, deepspeed.ops.adam, deepspeed.git_version_info, deepspeed.utils
        deepspeed.accelerator.get_accelerator().is_available()
        late = "torch.distributed.checkpoint" in sys.modules  # a third of the time: it comes with the first checkpoint
        print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), late, threading.active_count())
        """)
    )
    assert started == "False False False 1"


@pytest.mark.broad
def test_modules_that_clients_assign_into_are_ours_and_classes_have_one_identity() -> None:
    assert (
        said(
            *code("""
            import sys
            import deepspeed, deepspeed.comm.comm, deepspeed.runtime.engine
            import deepspeed.runtime.zero.partition_parameters as named
            from deepspeed.runtime.zero import partition_parameters as taken
            import zero.compat.comm_names, zero.compat.logs
            import zero.compat.partition_parameters as ours
            import zero.checkpointing
            assert named is taken is ours is sys.modules["deepspeed.runtime.zero.partition_parameters"]
            assert deepspeed.runtime.zero.partition_parameters is ours
            assert deepspeed.comm is zero.compat.comm_names is deepspeed.comm.comm
            assert deepspeed.utils.logging is zero.compat.logs and deepspeed.utils.logger is zero.compat.logs.logger
            assert deepspeed.checkpointing is zero.checkpointing
            assert deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing
            assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is zero.ZeroEngine
            assert deepspeed.zero.GatheredParameters is zero.GatheredParameters
            assert deepspeed.zero.Init is ours.Init and issubclass(deepspeed.zero.Init, zero.Init)
            assert deepspeed.zero.ZeroParamStatus is ours.ZeroParamStatus
            assert deepspeed.ops.adam.DeepSpeedCPUAdam is deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam
            assert deepspeed.runtime.lr_schedules.WarmupLR is zero.lr_schedules.WarmupLR
            named.somebodys = 1
            assert ours.somebodys == 1
            print("one")
            """)
        )
        == "one"
    )


REFUSED = {
    "tp_model_init(model=None, tp_size=2, dtype=None, config=None)": "tensor parallelism",
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers()": "sequence parallelism",
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter(None)": "sequence parallelism",
    "runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss.apply(print, None)": "torch.utils.checkpoint",
    "ops.random_ltd.dropping_utils.GatherTokens.apply(None)": "random layer drop",
    "utils.groups._get_sequence_parallel_group()": "sequence parallelism",
    "utils.groups._get_expert_parallel_group()": "experts",
    "moe.ep_router.TokenChoiceTopKRouter()": "experts",
    "runtime.pipe.schedule.TrainSchedule(4, 2, 0)": "pipeline.schedule",
    "compression.compress.init_compression(None, {})": "quantise",
    "inference.config.DeepSpeedInferenceConfig()": "init_inference",
    "runtime.fp16.onebit.adam.OnebitAdam([])": "1-bit",
    "ops.op_builder.CPUAdamBuilder().load()": "zero doctor",
    "checkpoint.ds_to_universal.main()": "any stage",
}


def test_using_what_is_not_implemented_names_the_feature_and_what_to_do(said_with_torch: Said) -> None:
    told = json.loads(
        said_with_torch(f"""
            import json, deepspeed
            told = {{}}
            for use in {list(REFUSED)!r}:
                try:
                    eval("deepspeed." + use)
                except NotImplementedError as error:
                    told[use] = str(error)
            print(json.dumps(told))
            """)
    )
    for use, words in REFUSED.items():
        assert told[use].startswith("deepspeed.") or "deepspeed" in told[use], use
        assert words in told[use], told[use]


def test_what_is_not_implemented_can_be_subclassed_and_asked_for(said_with_torch: Said) -> None:
    text = """
    import torch, deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    class Mine(DistributedAttention):
        def __init__(self):
            super().__init__(None, None)
    print(issubclass(Mine, torch.nn.Module), isinstance(torch.nn.Linear(1, 1), DistributedAttention),
        isinstance(1, deepspeed.moe.layer.MoE))
    try:
        Mine()
    except NotImplementedError as error:
        print("DistributedAttention" in str(error))
    """
    assert said_with_torch(text).split() == ["True", "False", "False", "True"]


def test_operators_tell_what_has_a_counterpart_here(said_with_torch: Said) -> None:
    text = """
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder
    from deepspeed.ops.aio import AsyncIOBuilder as same
    print(same is AsyncIOBuilder, AsyncIOBuilder().is_compatible(), GDSBuilder().is_compatible())
    there = deepspeed.ops.__compatible_ops__
    print(there[AsyncIOBuilder.NAME], there["cpu_adam"], there[GDSBuilder.NAME])
    """
    assert said_with_torch(text).split() == ["True", "True", "False", "True", "True", "False"]


def test_the_package_lies_where_the_wheel_takes_it_from() -> None:
    assert str(ROOT / "zero" / "compat" / "alias") == compat.ALIAS


class Pair(NamedTuple):
    ids: Any
    mask: Any


def test_trees_are_moved_as_deepspeed_moves_them() -> None:
    moved = move_to_device({"pair": Pair(torch.ones(2), 3), "list": [torch.ones(1)]}, "meta")
    assert moved["pair"][0].is_meta and moved["pair"][1] == 3 and moved["list"][0].is_meta
    kept = torch.nn.Parameter(torch.ones(2))
    assert move_to_device(kept, "cpu", torch.is_tensor) is kept
    whole = torch.ones(2, dtype=torch.float32)
    assert move_to_device([whole], torch.float64, torch.is_tensor)[0] is whole and whole.dtype == torch.float64
