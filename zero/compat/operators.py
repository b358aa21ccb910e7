"""`deepspeed.ops.op_builder`: which of DeepSpeed's native parts have a counterpart here, by its names."""

from __future__ import annotations

from typing import Any, ClassVar

from zero.compat.missing import refused

THERE = {"async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "pin_memory", "utils"}
"""The engine does this itself; nothing is built when it is asked for."""
ABSENT = {
    *("deepspeed_ccl_comm", "deepspeed_shm_comm", "deepspeed_not_implemented", "dc", "evoformer_attn", "fp_quantizer"),
    *("fused_lamb", "fused_lion", "gds", "inference_core_ops", "cutlass_ops", "quantizer", "ragged_device_ops"),
    *("ragged_ops", "random_ltd", "spatial_inference", "stochastic_transformer", "transformer", "sparse_attn"),
    "transformer_inference",
}


class OpBuilder:
    """One of DeepSpeed's native parts.

    Args:
        name: accepted.
    """

    NAME: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    def is_compatible(self, verbose: bool = False) -> bool:
        """True when the engine has a counterpart."""
        return self.NAME in THERE

    def absolute_name(self) -> str:
        """DeepSpeed's name of the extension."""
        return f"deepspeed.ops.{self.NAME}_op"

    def load(self, verbose: bool = True) -> Any:
        """Raises NotImplementedError: the engine's own libraries have other functions."""
        raise refused(f"ops.op_builder: {self.NAME}", "the engine loads its own libraries; `zero doctor` shows them")

    def builder(self) -> Any:
        """As `load`."""
        return self.load()


def _builder(kind: str, name: str) -> Any:
    return type(kind, (OpBuilder,), {"NAME": name, "__doc__": f"Of {name}."})


CLASS_NAMES = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "NotImplementedBuilder": "deepspeed_not_implemented",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
BUILDERS: dict[str, Any] = {kind: _builder(kind, name) for kind, name in CLASS_NAMES.items()}
ALL_OPS: dict[str, OpBuilder] = {kind.NAME: kind() for kind in BUILDERS.values()}
compatible_ops: dict[str, bool] = {name: name in THERE for name in sorted(THERE | ABSENT)}

globals().update(BUILDERS)
