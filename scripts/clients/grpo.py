"""Train with TRL's GRPOTrainer, the weights on NVMe: it generates, scores and trains in turn.

export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
python scripts/clients/grpo.py --steps 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from small import paragraphs, write_model, zero3
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def letters(completions: list[str], **more: Any) -> list[float]:
    """A reward that any model can learn: the share of letters in what it wrote."""
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("grpo-out"))
    options = parser.parse_args()
    write_model(options.folder / "base")
    trainer = GRPOTrainer(
        model=str(options.folder / "base"),
        reward_funcs=letters,
        args=GRPOConfig(
            output_dir=str(options.folder / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=False,
            report_to=[],
            save_strategy="no",
            deepspeed=zero3(options.folder / "swap", log_level="info"),
        ),
        train_dataset=Dataset.from_dict({"prompt": [text[:60] for text in paragraphs(64)]}),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "base", padding_side="left"),
    )
    trainer.train()
    trainer.save_model(str(options.folder / "model"))


if __name__ == "__main__":
    main()
