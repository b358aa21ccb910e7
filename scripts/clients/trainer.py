"""transformers' Trainer with a DeepSpeed config, as its manual has it; nothing in here knows of this library.

    export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
    python scripts/clients/trainer.py --stage 3 --device nvme --nvme-path /tmp

It trains on the standard library's sources, evaluates on other files, saves the model and loads it again.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from text import data, small_gpt2, zero_block
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="of ZeRO")
    parser.add_argument("--device", choices=("none", "cpu", "nvme"), default="none", help="for what is offloaded")
    parser.add_argument("--nvme-path", help="folder for --device nvme")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="without DeepSpeed, to compare with")
    parser.add_argument("--output", help="folder for the model; a temporary one else")
    return parser.parse_args()


def deepspeed_config(asked: argparse.Namespace) -> dict[str, Any]:
    """Everything that the Trainer knows is "auto"."""
    adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero_block(asked.stage, asked.device, asked.nvme_path),
    }


def main() -> None:
    """Train, evaluate, save and load."""
    asked = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.output or temporary
        chosen = TrainingArguments(
            output_dir=folder,
            deepspeed=None if asked.plain else deepspeed_config(asked),
            max_steps=asked.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=max(asked.steps // 10, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        training, held_out = data(8 * asked.steps, 16)
        set_seed(0)
        trainer = Trainer(model=small_gpt2(), args=chosen, train_dataset=training, eval_dataset=held_out)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder)
        if trainer.is_world_process_zero():
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            print(f"eval_loss {loss:.6f}, saved {loaded.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
