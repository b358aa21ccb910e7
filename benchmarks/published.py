"""Published models at their real shape: what each run of `benchmarks.largest_model` trains, in how little memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent.parent / "tests" / "data" / "shapes"
"""Configurations as transformers writes them, by hand from published numbers."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """One training run inside a memory cgroup, everything on NVMe, persistence threshold and budgets by default."""

    shape: str
    """File below `SHAPES`, without its ending."""
    limit_gib: float
    sequence: int
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of the shape that differ."""
    tuning: str = "full"
    """`full`, or `lora`: adapters over frozen 4-bit codes."""
    state_dtype: str = "fp32"

    @property
    def model(self) -> dict[str, Any]:
        """The keys of the Hugging Face config."""
        published: dict[str, Any] = json.loads((SHAPES / f"{self.shape}.json").read_text())
        return {**published, **self.changes}

    def config(self, path: Path | str) -> dict[str, Any]:
        """README's configuration."""
        nvme = {"device": "nvme", "nvme_path": str(path)}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": nvme,
                "offload_optimizer": {**nvme, "state_dtype": self.state_dtype},
            },
        }

    def spec(self, path: Path | str, *, warmup: int, steps: int) -> dict[str, Any]:
        """The specification for `benchmarks.shaped_worker`."""
        return {
            **{"model": self.model, "config": self.config(path), "tuning": self.tuning, "path": str(path)},
            **{"sequence": self.sequence, "warmup": warmup, "steps": steps, "checkpointing": self.limit_gib > 0},
        }

    def of_width(self, width: int, layers: int) -> RealRun:
        """The same kind of model, small: heads of 64, a vocabulary of 8192, and 8 experts where there are any."""
        small = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
        small |= {"num_key_value_heads": width // 128, "head_dim": 64, "vocab_size": 8192}
        small |= {"intermediate_size": 3 * width, "moe_intermediate_size": width // 2, "num_experts": 8}
        model = self.model
        changes = {key: value for key, value in small.items() if key in model or key == "head_dim"}
        return replace(self, changes={**self.changes, **changes, "tie_word_embeddings": False})

    def tenth(self) -> RealRun:
        """The same with a tenth of the layers: the working set is that of the whole."""
        layers = max(self.model["num_hidden_layers"] // 10, 2)
        return replace(self, changes={**self.changes, "num_hidden_layers": layers})


RUNS = {
    "8B": RealRun("llama-3.1-8b", limit_gib=6, sequence=64, state_dtype="8bit"),
    "5B": RealRun("llama-3.1-8b", limit_gib=4, sequence=64, changes={"num_hidden_layers": 24, "vocab_size": 32_000}),
    "30B-A3B": RealRun("qwen3-30b-a3b", limit_gib=8, sequence=16, tuning="lora"),
}
"""Llama-3.1-8B whole with 8-bit moments; the most that 80 GB of disk hold with fp32 moments; adapters on a mixture."""

KINDS = {
    "dense": RealRun("llama-3.1-8b", limit_gib=0, sequence=64),
    "LoRA": RealRun("llama-3.1-8b", limit_gib=0, sequence=64, tuning="adapters"),
    "experts": RealRun("qwen3-30b-a3b", limit_gib=0, sequence=64),
}
"""What peak memory is held against the plan for."""
WIDTHS = {"small": (768, 12), "medium": (1280, 16), "large": (2048, 24)}
"""(hidden size, layers)."""
