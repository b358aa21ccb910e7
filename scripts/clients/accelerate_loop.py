r"""A training loop with accelerate, as its manual has it; nothing in here knows of DeepSpeed, nor of this library.

    export PYTHONPATH="$(python -m zero.compat.deepspeed path)"
    accelerate launch --use_deepspeed --num_processes 1 --zero_stage 3 --offload_optimizer_device cpu \
        --offload_param_device cpu --zero3_save_16bit_model true scripts/clients/accelerate_loop.py

Without a launcher, --stage and --device make a plugin; with --plain there is none. Ranks of CPUs talk through gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from text import data, small_gpt2, zero_block
from torch.utils.data import DataLoader
from transformers import get_scheduler


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="of ZeRO, without a launcher")
    parser.add_argument("--device", choices=("none", "cpu", "nvme"), default="none", help="for what is offloaded")
    parser.add_argument("--nvme-path", help="folder for --device nvme")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of 4 a step")
    parser.add_argument("--plain", action="store_true", help="without DeepSpeed, to compare with")
    parser.add_argument("--output", help="folder for the model; none: it is not saved")
    return parser.parse_args()


def accelerator(asked: argparse.Namespace) -> Accelerator:
    """Of the launcher's making where there is one."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    plugin = None
    if not (launched or asked.plain):
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "zero_optimization": zero_block(asked.stage, asked.device, asked.nvme_path),
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    gloo = "RANK" in os.environ and not torch.cuda.is_available()
    return Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=asked.accumulation,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo else [],
    )


def main() -> None:
    """Train, evaluate, save."""
    asked = arguments()
    chosen = accelerator(asked)
    set_seed(0)
    model = small_gpt2()
    # One number for all ranks: each takes its share of the micro-batches.
    training, held_out = data(4 * asked.accumulation * asked.steps * chosen.num_processes, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    turns = asked.steps * chosen.num_processes  # accelerate takes a scheduler's step for each rank
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=turns)
    model, optimizer, loader, validation, scheduler = chosen.prepare(
        model, optimizer, DataLoader(training, batch_size=4), DataLoader(held_out, batch_size=4), scheduler
    )
    model.train()
    for number, batch in enumerate(loader):
        with chosen.accumulate(model):
            loss = model(**batch).loss
            chosen.backward(loss)
            if chosen.sync_gradients:
                chosen.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number % (10 * asked.accumulation) == 0:
            chosen.print(f"micro-batch {number}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        losses = [chosen.gather(model(**batch).loss.reshape(1)) for batch in validation]
    chosen.print(f"eval_loss {torch.cat(losses).mean().item():.6f} on {chosen.num_processes} ranks")
    if asked.output is not None:
        chosen.save_model(model, asked.output)
    chosen.end_training()


if __name__ == "__main__":
    main()
