"""Fine-tune with TRL's SFTTrainer as its tutorials do, the weights on NVMe: nothing in it knows of this library.

export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
python scripts/clients/sft.py --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import psutil
from datasets import Dataset
from small import paragraphs, write_model, zero3
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

AUTO = "auto"
OPTIMIZER = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
}


class MemoryCallback(TrainerCallback):
    """Prints how much memory the process has at each logged step."""

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the trainer."""
        print(f"step {state.global_step}: {psutil.Process().memory_info().rss / 1e6:.0f} MB resident")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("sft-out"))
    options = parser.parse_args()
    write_model(options.folder / "base")
    config = zero3(options.folder / "swap", optimizer=OPTIMIZER, scheduler=SCHEDULER)
    trainer = SFTTrainer(
        model=str(options.folder / "base"),
        args=SFTConfig(
            output_dir=str(options.folder / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=max(options.steps // 10, 2),
            logging_steps=max(options.steps // 10, 1),
            max_length=256,
            bf16=False,
            report_to=[],
            save_strategy="no",
            deepspeed=config,
        ),
        train_dataset=Dataset.from_dict({"text": paragraphs(200)}),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "base"),
        callbacks=[MemoryCallback()],
    )
    trainer.train()
    trainer.save_model(str(options.folder / "model"))


if __name__ == "__main__":
    main()
