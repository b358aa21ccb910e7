"""Fine-tune a Hugging Face model from a local folder, its weights and optimizer states on NVMe or in host memory.

    python scripts/finetune.py MODEL --data notes.txt --offload-to /nvme --out tuned
    python scripts/finetune.py MODEL --data chats.jsonl --offload-to /nvme --out tuned --adapter lora
    zero run --num_gpus 8 scripts/finetune.py MODEL --data chats.jsonl --offload-to /nvme --out tuned

MODEL is a folder as `save_pretrained` or `hf download` leaves it: config.json, *.safetensors, a tokenizer. Data is
text, or JSON lines with "text" or "messages". The plan of the memory is printed before anything is allocated. What
comes out is a folder for `from_pretrained` in bf16, of an adapter the adapter's. Needs transformers; adapters need
peft, qlora bitsandbytes. On a CPU begin with --steps 10 --sequence 128 --accumulation 2.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import zero

try:
    import transformers
except ImportError as error:
    raise SystemExit(f"finetune.py: {error}; run: pip install transformers peft bitsandbytes") from None

ADAPTER: dict[str, Any] = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
"""Of peft.LoraConfig."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="text, or JSON lines with text or messages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--offload-to", default="cpu", metavar="PLACE", help="a folder on NVMe, cpu, or none (cpu)")
    parser.add_argument("--adapter", choices=("none", "lora", "qlora"), default="none", help="train all, or an adapter")
    memory = 'for what could be on the drive: such as 32GB; "auto": most of what is free; "least": none of it (auto)'
    parser.add_argument("--host-memory", default="auto", metavar="BYTES", help=memory)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="samples of a rank at once")
    parser.add_argument("--accumulation", type=int, default=8, help="batches of a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=None, help="default: 1e-5, and 1e-4 for an adapter")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="checkpoints, to go on from (off)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # zero run passes it
    return checked(parser.parse_args(arguments))


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """What would fail after hours fails now."""
    place = options.offload_to
    for path, there, what in (
        (options.model / "config.json", Path.is_file, "the folder of a model has it"),
        (options.data, Path.is_file, "give the file with the texts"),
        (Path(place), Path.is_dir, "make the folder, on the drive that is meant"),
    ):
        if str(path) not in ("cpu", "none") and not there(path):
            raise SystemExit(f"{path}: no such {'folder' if there is Path.is_dir else 'file'}; {what}")
    options.out.mkdir(parents=True, exist_ok=True)
    need = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    free = shutil.disk_usage(options.out).free
    if options.adapter == "none" and free < need:
        raise SystemExit(f"--out {options.out}: {free:,} bytes are free, the model takes {need:,}; give another folder")
    return options


def make_config(options: argparse.Namespace) -> dict[str, Any]:
    """What a DeepSpeed JSON would say; every key is DeepSpeed's but `memory_budget`."""
    device = options.offload_to if options.offload_to in ("cpu", "none") else "nvme"
    place = {"device": device, **({"nvme_path": options.offload_to} if device == "nvme" else {})}
    budgeted = device == "nvme" and options.host_memory != "least"
    lr = options.lr if options.lr is not None else 1e-5 if options.adapter == "none" else 1e-4
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": max(options.steps // 20, 2)},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **({"memory_budget": {"host": options.host_memory}} if budgeted else {}),
        "log_level": "info",
    }


def texts(path: Path, tokenizer: Any) -> Iterator[str]:
    """One after another; chats in the model's own form."""
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        if "messages" in sample:
            yield tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        else:
            yield sample["text"]


def samples(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Token ids, [sequence] each: all texts one behind the other, cut."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [number for text in texts(options.data, tokenizer) for number in [*tokenizer(text)["input_ids"], *end]]
    count = len(ids) // options.sequence
    if count == 0:
        raise SystemExit(f"{options.data}: {len(ids)} tokens, expected at least --sequence {options.sequence}")
    return list(torch.tensor(ids[: count * options.sequence]).view(count, options.sequence))


def build(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The model: its weights go to storage as they are read, never the whole model into memory."""
    if options.adapter == "qlora":
        codes = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, quantization_config=codes)
    else:
        shape = transformers.AutoConfig.from_pretrained(options.model)
        with zero.Init(config_dict_or_path=config):
            model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        zero.load_pretrained(model, options.model)
    model.config.use_cache = False
    if options.adapter != "none":
        import peft

        if options.adapter == "qlora":
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTER))
        model.enable_input_require_grads()
    # transformers 6 has the second name alone, 4 the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model


def train(engine: Any, options: argparse.Namespace) -> float:
    """All steps; the mean loss of the last one."""
    micro_batches, loss_sum, mean = iter(zero.RepeatingLoader(engine.training_dataloader)), 0.0, float("nan")
    batches, done = options.steps * options.accumulation, engine.global_steps * options.accumulation
    bar = tqdm(total=batches, initial=done, disable=engine.global_rank != 0, unit="batch")
    while engine.global_steps < options.steps:
        ids = next(micro_batches).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        loss_sum += loss.item()
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        bar.update()
        if at_boundary:
            mean, loss_sum = loss_sum / options.accumulation, 0.0
            bar.set_postfix(step=engine.global_steps, loss=f"{mean:.3f}")
            if options.save_every and engine.global_steps % options.save_every == 0:
                engine.save_checkpoint(options.out / "checkpoints")
    bar.close()
    return mean


def save(engine: Any, tokenizer: Any, options: argparse.Namespace) -> None:
    """What `from_pretrained` reads, of an adapter the adapter's folder."""
    if options.adapter == "none":
        engine.save_16bit_model(options.out)
        if engine.global_rank == 0:
            shape = transformers.AutoConfig.from_pretrained(options.model)
            shape.dtype = torch.bfloat16
            shape.save_pretrained(options.out)
            if getattr(engine.module, "generation_config", None) is not None:
                engine.module.generation_config.save_pretrained(options.out)
    else:
        with zero.GatheredParameters([p for p in engine.module.parameters() if p.requires_grad]):
            if engine.global_rank == 0:
                engine.module.save_pretrained(options.out)
    if engine.global_rank == 0:
        tokenizer.save_pretrained(options.out)


def main(arguments: list[str] | None = None) -> float:
    options = parse_arguments(arguments)
    transformers.set_seed(options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    data, config = samples(options, tokenizer), make_config(options)
    engine = zero.initialize(model=build(options, config), config=config, training_data=data)[0]
    if options.save_every:
        engine.load_checkpoint(options.out / "checkpoints")  # goes on from the newest, if there is one
    try:
        loss = train(engine, options)
        save(engine, tokenizer, options)
    finally:
        engine.close()
    if engine.global_rank == 0:
        print(f"loss {loss:.3f}; the model is in {options.out}")
    return loss


if __name__ == "__main__":
    main()
