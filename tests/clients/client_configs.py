"""DeepSpeed configs as the clients' manuals have them: most values "auto"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

AUTO = "auto"
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP_DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": AUTO,
        "warmup_num_steps": AUTO,
        "total_num_steps": AUTO,
        "warmup_type": "linear",
    },
}
STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")


def zero_config(
    stage: int,
    device: str = "none",
    nvme_path: Path | str | None = None,
    *,
    threshold: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The config of a stage with its weights and states on `device`, as far as the stage lets them.

    Args:
        stage: of ZeRO.
        device: none, cpu or nvme; at stage 0 only none.
        nvme_path: for nvme.
        threshold: stage3_param_persistence_threshold; None leaves it "auto".
        more: top-level keys; None takes one out.
    """
    block: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    place = {"device": device} if nvme_path is None or device != "nvme" else {"device": device, "nvme_path": str(nvme_path)}
    if device != "none":
        block["offload_optimizer"] = {**place, "pin_memory": True}
    if stage == 3:
        if device != "none":
            block["offload_param"] = {**place, "pin_memory": True}
        block.update(
            reduce_bucket_size=AUTO,
            stage3_prefetch_bucket_size=AUTO,
            stage3_param_persistence_threshold=AUTO if threshold is None else threshold,
            stage3_gather_16bit_weights_on_model_save=True,
        )
    config: dict[str, Any] = {
        "fp16": {"enabled": AUTO},
        "bf16": {"enabled": AUTO},
        "zero_optimization": block,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        **more,
    }
    return {key: value for key, value in config.items() if value is not None}


def possible(stage: int, device: str) -> bool:
    """Stage 0 keeps everything where it computes; NVMe holds what stage 3 shards."""
    return device == "none" if stage == 0 else True
