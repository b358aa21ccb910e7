"""Names at DeepSpeed's top level that stand for nothing here."""

from __future__ import annotations

from zero.compat.missing import missing_function

tp_model_init = missing_function(
    "tp_model_init", "tensor parallelism is not; stage 3 shards weights over the same ranks without it"
)
