"""Every module of DeepSpeed 0.19 can be imported under the alias, and a name in it is ours, a value or a refusal."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from aliased import ROOT, code, said, script
from probe import alias_tables

Said = Callable[[str], str]
MODULES = (ROOT / "tests/data/deepspeed_modules.txt").read_text(encoding="utf-8").split()


@pytest.mark.broad
def test_every_module_imports_and_its_names_are_there_and_no_others() -> None:
    told = said(
        *code(f"""
        import importlib, json
        wrong, seen = [], 0
        for path in {MODULES!r}:
            try:
                module = importlib.import_module(path)
                if hasattr(module, "nothing_of_this_name") or hasattr(module, "__nothing__"):
                    wrong.append(f"{{path}} has a name that nobody has")
                for name in getattr(module, "__all__", ()):
                    seen += getattr(module, name) is not NotImplemented
                exec(f"from {{path}} import *")
            except Exception as error:
                wrong.append(f"{{path}}: {{error!r}}")
        print(json.dumps([wrong, seen]))
        """)
    )
    wrong, seen = json.loads(told)
    assert wrong == []
    assert seen > 3500


NAMES = {
    "launcher.multinode_runner": "MultiNodeRunner PDSHRunner OpenMPIRunner SlurmRunner",
    "launcher.constants": "PDSH_LAUNCHER OPENMPI_LAUNCHER PDSH_MAX_FAN_OUT",
    "launcher.runner": "parse_args fetch_hostfile parse_resource_filter _parse_hostfile encode_world_info",
    "utils.numa": "get_numactl_cmd parse_range_list",
    "utils.debug": "debug_extract_module_and_param_names debug_param2name printflock",
    "utils.comms_logging": "CommsLogger calc_bw_log convert_size",
    "runtime.constants": "TRAIN_BATCH_SIZE GRADIENT_CLIPPING_DEFAULT ROUTE_TRAIN PLD_THETA",
    "runtime.config_utils": "DeepSpeedConfigModel get_scalar_param dict_raise_error_on_duplicate_keys",
    "runtime.torch_autocast": "init_autocast_params has_comm_dtype",
    "runtime.sparse_tensor": "SparseTensor",
    "runtime.progressive_layer_drop": "ProgressiveLayerDrop",
    "runtime.checkpoint_engine": "TorchCheckpointEngine create_checkpoint_engine",
    "runtime.zero.leaf_module_config": "DEFAULT_LEAF_MODULE_CLASSES DeepSpeedZeroLeafModuleConfig",
    "runtime.zero.utils": "ZERO_SUPPORTED_OPTIMIZERS",
    "runtime.utils": "PartitionedTensor partition_balanced partition_uniform prefix_sum_inc",
    "utils.timer": "SynchronizedWallClockTimer ThroughputTimer NoopTimer trim_mean FORWARD_GLOBAL_TIMER",
    "runtime.data_pipeline.data_sampling.data_sampler": "DeepSpeedDataSampler",
    "runtime.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
    "runtime.data_pipeline.data_routing.helper": "convert_to_random_ltd save_without_random_ltd",
    "runtime.domino.transformer": "DominoTransformer",
    "compile.backend": "make_backend",
    "io.fast_file_writer": "FastFileWriter",
    "nvme": "parse_sweep_arguments",
    "inference.v2": "build_hf_engine InferenceEngineV2 RaggedInferenceEngineConfig",
    "ops.sparse_attention": "SparseSelfAttention FixedSparsityConfig",
    "accelerator.cuda_accelerator": "CUDA_Accelerator",
    "accelerator.cpu_accelerator": "CPU_Accelerator",
    "accelerator": "set_accelerator get_accelerator DeepSpeedAccelerator",
    "comm": "configure all_reduce_coalesced mpi_discovery TorchBackend CCLBackend log_summary default_pg_timeout",
    "constants": "CROSS_RANK CROSS_SIZE LOCAL_RANK",
    "checkpoint": "UNIVERSAL_CHECKPOINT_INFO DeepSpeedCheckpoint SubparamShape",
    "compression.helper": "recursive_getattr recursive_setattr convert_conv1d_to_linear",
    "moe.layer": "MoE",
}


def test_names_that_clients_import_are_there(said_with_torch: Said) -> None:
    lines = [f"from deepspeed.{home} import {', '.join(names.split())}" for home, names in NAMES.items()]
    assert said_with_torch("\n".join([*lines, "print('all')"])) == "all"


OTHERS = {
    "launcher.launch": {"parse_args"},  # of the command, where ours has those of the launcher
}
"""Of names that a module of ours has too those that mean something else in DeepSpeed's."""


def test_what_a_module_of_ours_has_under_deepspeeds_name_is_handed_out() -> None:
    surface, ours = alias_tables()
    missing = []
    for place, sources in ours.items():
        theirs = {*surface[place].get("functions", "").split(), *surface[place].get("classes", ())}
        told = {name.partition("=")[0] for names in sources.values() for name in names.split()}
        for source in sources:
            found = vars(importlib.import_module(source)) if source.startswith("zero") else {}
            own = {name for name, value in found.items() if getattr(value, "__module__", "").startswith("zero")}
            missing += [f"{place}.{name}" for name in (own & theirs) - told - OTHERS.get(place, set())]
    assert missing == []


VALUES = {
    "constants.CROSS_RANK": "CROSS_RANK",
    "launcher.constants.PDSH_MAX_FAN_OUT": 1024,
    "runtime.constants.TRAIN_BATCH_SIZE": "train_batch_size",
    "runtime.constants.STEPS_PER_PRINT_DEFAULT": None,
    "runtime.constants.ROUTE_ENCODE": "encode",
    "runtime.config.ADAM_OPTIMIZER": "adam",
    "runtime.zero.config.ZERO_OPTIMIZATION": "zero_optimization",
    "checkpoint.UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
    "checkpoint.constants.ZERO_STAGE": "zero_stage",
    "runtime.constants.CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
    "runtime.model_checkpointing.constants.ValidationMode.FAIL": "FAIL",
    "runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_NAMES": [],
    "checkpoint.constants.FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    "elasticity.constants.ELASTICITY": "elasticity",
}


def test_a_constant_has_deepspeeds_value(said_with_torch: Said) -> None:
    text = f"import json, deepspeed; print(json.dumps({{p: eval('deepspeed.' + p) for p in {list(VALUES)!r}}}))"
    assert json.loads(said_with_torch(text)) == VALUES


def test_small_functions_do_what_theirs_do(said_with_torch: Said, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2  # two\n")
    text = f"""
    import base64, json, torch
    from deepspeed.launcher.runner import (
        _parse_hostfile, encode_world_info, fetch_hostfile, parse_args, parse_inclusion_exclusion, parse_resource_filter
    )
    pool = fetch_hostfile({str(tmp_path / "hosts")!r})
    assert pool == _parse_hostfile(["a slots=4", "# none", "b slots=2"]) == {{"a": 4, "b": 2}}
    assert fetch_hostfile("/nowhere") is None
    try:
        _parse_hostfile(["a four"])
    except ValueError as error:
        assert "slots" in str(error)
    assert parse_inclusion_exclusion(pool, "b@a:1,3", "") == {{"a": [1, 3], "b": [0, 1]}}
    assert parse_resource_filter({{"a": [0, 2], "b": [1]}}, exclude_str="a:2") == {{"a": [0], "b": [1]}}
    assert json.loads(base64.urlsafe_b64decode(encode_world_info({{"a": [0]}}))) == {{"a": [0]}}
    options = parse_args(["--num_gpus", "2", "train.py", "--lr", "1"])
    assert (options.num_gpus, options.user_script, options.user_args) == (2, "train.py", ["--lr", "1"])
    from deepspeed.utils.numa import parse_range_list
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    from deepspeed.utils.comms_logging import convert_size
    assert [convert_size(n) for n in (0, 1536, 2**30)] == ["0B", "1.5 KB", "1.0 GB"]
    from deepspeed.utils.debug import debug_extract_module_and_param_names, debug_module2name, debug_param2name_id_shape
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    debug_extract_module_and_param_names(model)
    assert debug_module2name(model[0]) == "0" and debug_module2name(torch.nn.Linear(1, 1)) == "unknown"
    assert debug_param2name_id_shape(model[0].weight) == "name=0.weight id=none shape=torch.Size([3, 2])"
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys, get_scalar_param
    assert get_scalar_param({{"a": 1}}, "a", 2) == 1 and get_scalar_param({{}}, "a", 2) == 2
    try:
        json.loads('{{"a": 1, "a": 2}}', object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ValueError as error:
        print(error)
    """
    assert "['a']" in said_with_torch(text)


@pytest.mark.broad
def test_modules_of_a_model_are_found_set_and_made_linear() -> None:
    text = """
    import torch
    from transformers.pytorch_utils import Conv1D
    from deepspeed.compression.helper import convert_conv1d_to_linear, recursive_getattr, recursive_setattr
    model = torch.nn.Sequential(torch.nn.Sequential(Conv1D(6, 4)), torch.nn.Linear(6, 2))
    sample = torch.randn(3, 4)
    before = model(sample)
    assert convert_conv1d_to_linear(model, Conv1D) is model
    made = recursive_getattr(model, "0.0")
    print(type(made).__name__, tuple(made.weight.shape), torch.allclose(before, model(sample), atol=1e-6))
    recursive_setattr(model, "0.0", torch.nn.Identity())
    print(type(model[0][0]).__name__)
    """
    assert said(*code(text)).split("\n") == ["Linear (6, 4) True", "Identity"]


REFUSED = {
    "inference.v2.build_hf_engine('.')": "init_inference",
    "launcher.multinode_runner.PDSHRunner(None, '')": "zero run",
    "runtime.sparse_tensor.SparseTensor()": "reduced dense",
    "runtime.checkpoint_engine.TorchCheckpointEngine()": "save_checkpoint",
    "ops.sparse_attention.SparseSelfAttention()": "flex_attention",
    "nvme.parse_sweep_arguments()": "zero doctor --probe",
    "compile.backend.make_backend(None)": "engine.compile",
    "accelerator.set_accelerator(None)": "ZERO_DEVICE",
    "comm.TorchBackend(None, None, None)": "torch.distributed",
    "moe.mappings.gather_tokens(None)": "experts",
    "runtime.comm.coalesced_collectives.reduce_scatter_coalesced([])": "reduce_scatter_tensor",
    "runtime.comm.coalesced_collectives.all_to_all_quant_reduce([], None)": "communication_data_type",
    "ops.adam.zenflow_cpu_adam.ZenFlowCPUAdam([])": "ZenFlow",
    "runtime.zenflow.engine.zenflow_step(None, None)": "in the background",
    "runtime.activation_checkpointing.offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()": (
        "activation_device"
    ),
    "runtime.zero.muon.muon_optimizer.MuonWithAuxAdam([])": "Muon",
    "runtime.zero.mics.MiCS_Optimizer()": "mics_shard_size",
    "runtime.chunked_cross_entropy.chunked_cross_entropy()": "slice of the sequence",
    "runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator()": "internals of sharding",
}


def test_a_refusal_names_itself_and_what_to_do(said_with_torch: Said) -> None:
    told = json.loads(
        said_with_torch(f"""
            import json, deepspeed
            told = {{}}
            for use in {list(REFUSED)!r}:
                try:
                    told[use] = repr(eval("deepspeed." + use))
                except NotImplementedError as error:
                    told[use] = str(error)
            print(json.dumps(told))
            """)
    )
    for use, words in REFUSED.items():
        assert told[use].startswith("deepspeed.") and use.partition("(")[0].rpartition(".")[2] in told[use], told[use]
        assert words in told[use], told[use]


def test_the_page_of_refused_names_is_current(said_with_torch: Said) -> None:
    """If not: python scripts/alias_refusals.py > docs/alias-refused.md"""
    text = f"import runpy; runpy.run_path({str(ROOT / 'scripts/alias_refusals.py')!r}, run_name='__main__')"
    assert (ROOT / "docs/alias-refused.md").read_text(encoding="utf-8").strip() == said_with_torch(text)


def test_what_is_refused_derives_from_what_clients_count_on(said_with_torch: Said) -> None:
    text = """
    import pickle, torch, deepspeed
    from deepspeed.elasticity.config import ElasticityError
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
    try:
        raise ElasticityError("own")
    except ElasticityError as error:
        print(error)
    print(issubclass(FusedLamb, torch.optim.Optimizer), issubclass(TiedLayerSpec, LayerSpec))
    print(pickle.loads(pickle.dumps(LayerSpec)) is LayerSpec is deepspeed.pipe.LayerSpec)
    """
    assert said_with_torch(text).split() == ["own", "True", "True", "True"]


@pytest.mark.parametrize("first", ["", "from deepspeed.utils import set_z3_leaf_modules"])
def test_a_submodule_does_not_hide_the_function_of_its_name(said_with_torch: Said, first: str) -> None:
    text = f"""
    {first}
    from deepspeed.utils import z3_leaf_module
    import torch
    print(z3_leaf_module(torch.nn.Linear(1, 1)))
    """
    assert said_with_torch(text).split() == ["False"]


def test_a_submodule_does_not_hide_what_a_module_of_ours_uses(said_with_torch: Said) -> None:
    text = """
    import deepspeed.comm.torch, deepspeed.comm, deepspeed.utils.torch, deepspeed.ops.op_builder.async_io as one
    print(deepspeed.comm.has_all_reduce_coalesced(), deepspeed.comm.torch.TorchBackend is deepspeed.comm.TorchBackend)
    print(one.AsyncIOBuilder is deepspeed.ops.op_builder.AsyncIOBuilder)
    """
    assert said_with_torch(text).split() == ["True"] * 3


@pytest.mark.broad
@pytest.mark.parametrize("module", ["deepspeed.utils.zero_to_fp32", "deepspeed.launcher.runner"])
def test_a_module_with_a_command_runs_as_one(module: str) -> None:
    assert "usage: " in said("-m", module, "--help")


@pytest.mark.broad
def test_the_launcher_runs_a_script_as_a_module_too(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    assert "1 ['--local_rank=0', '--x']" in said("-m", "deepspeed.launcher.runner", "--num_gpus", "1", str(path), "--x")


@pytest.mark.broad
def test_every_child_finds_what_the_tables_have(tmp_path: Path) -> None:
    text = """
    import multiprocessing, subprocess, sys
    def who():
        from deepspeed.inference.v2 import InferenceEngineV2
        import deepspeed.runtime.zero.config as config
        print(InferenceEngineV2.__module__ == "deepspeed.inference.v2.engine_v2", config.ZERO_FORMAT != "", flush=True)
    if __name__ == "__main__":
        for method in ("fork", "spawn"):
            child = multiprocessing.get_context(method).Process(target=who)
            child.start()
            child.join()
        subprocess.run([sys.executable, "-c", "import deepspeed.io.constants as c; print(c.__name__)"])
    """
    assert said(str(script(tmp_path, text))).split() == ["True"] * 4 + ["deepspeed.io.constants"]
