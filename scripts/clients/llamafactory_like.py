"""The run that `llamafactory-cli train` does for a YAML file with `deepspeed: ds_z3_offload_config.json`, retold.

export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
python scripts/clients/llamafactory_like.py --deepspeed tests/data/configs/llamafactory_z3_offload.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from small import paragraphs, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

SHIPPED = Path(__file__).resolve().parents[2] / "tests" / "data" / "configs" / "llamafactory_z3_offload.json"


def main() -> None:
    """Train, save, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, default=SHIPPED, help="one of LLaMA-Factory's configs")
    parser.add_argument("--finetuning-type", choices=("lora", "full"), default="lora")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("llamafactory-out"))
    options = parser.parse_args()
    write_model(options.folder / "base")
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(options.folder / "run"),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        logging_steps=max(options.steps // 10, 1),
        report_to=[],
        save_strategy="no",
        deepspeed=str(options.deepspeed),
    )
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "base")
    model = AutoModelForCausalLM.from_pretrained(options.folder / "base")
    if options.finetuning_type == "lora":
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    encoded = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in paragraphs(200)]
    rows = [{"input_ids": ids, "labels": ids} for ids in encoded]
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8, label_pad_token_id=-100),
        train_dataset=rows[:-20],
        eval_dataset=rows[-20:],
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.save_model(str(options.folder / "model"))
    trainer.log_metrics("train", result.metrics)
    trainer.save_state()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
