"""Train a PEFT adapter under transformers' Trainer, the frozen base on NVMe.

export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
python scripts/clients/lora.py --steps 20 [--dora]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from small import paragraphs, write_model, zero3
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    """Train and save the adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("lora-out"))
    options = parser.parse_args()
    write_model(options.folder / "base")
    # The arguments come before the model: at stage 3 it is then built straight into its place.
    arguments = TrainingArguments(
        output_dir=str(options.folder / "run"),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=max(options.steps // 10, 1),
        report_to=[],
        save_strategy="no",
        deepspeed=zero3(options.folder / "swap"),
    )
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "base")
    base = AutoModelForCausalLM.from_pretrained(options.folder / "base")
    targets = ["q_proj", "v_proj", "up_proj"]
    adapter = LoraConfig(r=8, target_modules=targets, use_dora=options.dora, task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter)
    model.print_trainable_parameters()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[tokenizer(text, truncation=True, max_length=256) for text in paragraphs(200)],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(str(options.folder / "adapter"))


if __name__ == "__main__":
    main()
