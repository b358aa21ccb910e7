"""transformers' Trainer with the AdamW states on NVMe.

python trainer.py --nvme-path /nvme --output out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import zero


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Counting, from a random number on."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(64, (1,), generator=torch.Generator().manual_seed(index))
        ids = (start + torch.arange(32)) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train, and go on from the last checkpoint in the output folder if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", required=True, help="a folder on the NVMe drive")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, **sizes))
    arguments = TrainingArguments(
        output_dir=str(given.output),
        max_steps=given.steps,
        per_device_train_batch_size=8,
        save_steps=5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    model.to(arguments.device)  # before the optimizer is made
    optimizer = zero.OffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=1e-2,
        offload={"device": "nvme", "nvme_path": given.nvme_path},
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, given.steps)
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), optimizers=(optimizer, schedule))
    last = get_last_checkpoint(str(given.output)) if given.output.exists() else None
    print(trainer.train(resume_from_checkpoint=last).metrics)
    optimizer.close()


if __name__ == "__main__":
    main()
