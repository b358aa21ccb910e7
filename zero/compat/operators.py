"""`deepspeed.ops.op_builder` and `git_version_info`: DeepSpeed's names for build parts that have a counterpart here."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch

from offload.accelerator import collectives_version
from zero.compat import aio
from zero.compat.unavailable import unavailable_error

# The version that `import deepspeed` has: the version of DeepSpeed whose names are covered, and that of the alias.
#
# The package itself, the name of the dist-info folder and its METADATA have the same version; a test compares them.
VERSION = "0.19.6+zero.1"

# Operators that the engine has itself; nothing is built on request.
AVAILABLE_OPS = {"async_io", "fused_adam", "fused_lamb", "fused_lion", "pin_memory", "utils"}
AVAILABLE_OPS |= {"cpu_adam", "cpu_adagrad", "cpu_lion"}
# Name of a class = name of its operator.
CLASS_NAMES = """
    AsyncIOBuilder=async_io CCLCommBuilder=deepspeed_ccl_comm CPUAdagradBuilder=cpu_adagrad CPUAdamBuilder=cpu_adam
    CPULionBuilder=cpu_lion DeepCompileBuilder=dc EvoformerAttnBuilder=evoformer_attn FPQuantizerBuilder=fp_quantizer
    FusedAdamBuilder=fused_adam FusedLambBuilder=fused_lamb FusedLionBuilder=fused_lion GDSBuilder=gds
    InferenceBuilder=transformer_inference InferenceCoreBuilder=inference_core_ops InferenceCutlassBuilder=cutlass_ops
    NotImplementedBuilder=deepspeed_not_implemented PinMemoryBuilder=pin_memory QuantizerBuilder=quantizer
    RaggedOpsBuilder=ragged_device_ops RaggedUtilsBuilder=ragged_ops RandomLTDBuilder=random_ltd
    ShareMemCommBuilder=deepspeed_shm_comm SparseAttnBuilder=sparse_attn SpatialInferenceBuilder=spatial_inference
    StochasticTransformerBuilder=stochastic_transformer TransformerBuilder=transformer UtilsBuilder=utils
"""


class OpBuilder:
    NAME: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.NAME in AVAILABLE_OPS

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}_op"

    def load(self, verbose: bool = True) -> Any:
        """Raises NotImplementedError, since the engine's own libraries have other functions."""
        raise unavailable_error(
            f"ops.op_builder: {self.NAME}", "the engine loads its own libraries; `zero doctor` shows them"
        )

    def builder(self) -> Any:
        return self.load()


def load_async_io(builder: OpBuilder, verbose: bool = True) -> ModuleType:
    """The module with `aio_handle`."""
    return aio


BUILDERS: dict[str, Any] = {
    kind: type(kind, (OpBuilder,), {"NAME": name, "__doc__": f"Of {name}."})
    for kind, _, name in (word.partition("=") for word in CLASS_NAMES.split())
}
BUILDERS["AsyncIOBuilder"].load = load_async_io
ALL_OPS: dict[str, OpBuilder] = {kind.NAME: kind() for kind in BUILDERS.values()}
compatible_ops: dict[str, bool] = {name: name in AVAILABLE_OPS for name in sorted(ALL_OPS)}

globals().update(BUILDERS)

git_hash = git_branch = "none"
accelerator_name = ""
installed_ops = compatible_ops
# DeepSpeed's record of its build; here there is no build, so these are torch's own values.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, (collectives_version() or (0, 0))[:2])),
    "hip_version": torch.version.hip or "0.0",
}
