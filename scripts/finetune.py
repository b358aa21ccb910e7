"""Fine-tune a Hugging Face model from a local folder, its weights and optimizer states on NVMe or in host memory.

    python scripts/finetune.py MODEL --data notes.txt --offload-to /nvme --out tuned
    python scripts/finetune.py MODEL --data chats.jsonl --offload-to /nvme --out tuned --adapter lora
    zero run --num_gpus 8 scripts/finetune.py MODEL --data chats.jsonl --offload-to /nvme --out tuned

MODEL is a folder as `save_pretrained` or `hf download` leaves it: config.json, *.safetensors, a tokenizer. Data is
text, or JSON lines with "text" or "messages". The plan of the memory is printed before anything is allocated. What
comes out is a folder for `from_pretrained` in the dtype of the training, of an adapter the adapter's. Needs
transformers; adapters need peft, qlora bitsandbytes. On a CPU begin with --steps 10 --sequence 128 --accumulation 2.
With --save-every the same command goes on where it was ended; the newest two checkpoints stay.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

import zero
from offload.accelerator import compute_device
from offload.errors import BudgetError, ConfigError
from offload.kernels.matmul_speed import slow_bf16
from zero.config.numbers import parse_bytes

try:
    import transformers
except ImportError as error:
    raise SystemExit(f"finetune.py: {error}; run: pip install transformers peft bitsandbytes") from None

ADAPTER: dict[str, Any] = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
"""Of peft.LoraConfig."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEPT = 2
"""Checkpoints that stay."""
FIRST = os.environ.get("RANK", "0") == "0"
"""Of several ranks one speaks."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="text, or JSON lines with text or messages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--offload-to", default="cpu", metavar="PLACE", help="a folder on NVMe, cpu, or none (cpu)")
    parser.add_argument("--adapter", choices=("none", "lora", "qlora"), default="none", help="train all, or an adapter")
    dtype = "auto: bf16, or fp32 on a CPU where bf16 is clearly slower (auto)"
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype)
    memory = 'for what could be on the drive: such as 32GB; "auto": most of what is free; "least": none of it (auto)'
    parser.add_argument("--host-memory", type=memory_size, metavar="BYTES", help=memory)
    parser.add_argument("--steps", type=at_least(1), default=100, help="optimizer steps (100)")
    parser.add_argument("--batch", type=at_least(1), default=1, help="samples of a rank at once (1)")
    parser.add_argument("--accumulation", type=at_least(1), default=8, help="batches of a step (8)")
    parser.add_argument("--sequence", type=at_least(2), default=1024, help="tokens of a sample (1024)")
    parser.add_argument("--lr", type=float, default=None, help="default: 1e-5, and 1e-4 for an adapter")
    every = "checkpoints; the same command goes on from the newest (off)"
    parser.add_argument("--save-every", type=at_least(0), default=0, metavar="STEPS", help=every)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples (0)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # zero run passes it
    return checked(parser.parse_args(arguments))


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number; argparse names the option."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}, got {text!r}")
        return int(text)

    return read


def memory_size(text: str) -> str:
    try:
        return text if text in ("auto", "least") else str(parse_bytes(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected "auto", "least" or bytes such as 32GB, got {text!r}') from None


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """What would fail after hours fails now, before anything is written."""
    place = options.offload_to
    for path, there, what in (
        (options.model / "config.json", Path.is_file, "the folder of a model has it"),
        (options.data, Path.is_file, "give the file with the texts"),
        (Path(place), Path.is_dir, "make the folder, on the drive that is meant"),
    ):
        if str(path) not in ("cpu", "none") and not there(path):
            raise SystemExit(f"{path}: no such {'folder' if there is Path.is_dir else 'file'}; {what}")
    if options.out.resolve() == options.model.resolve():
        raise SystemExit(f"--out {options.out}: is the folder of the model, whose files it would replace; give another")
    if options.host_memory is not None and place in ("cpu", "none"):
        fix = "leave it out, or give a folder on a drive to --offload-to"
        raise SystemExit(f"--host-memory: --offload-to {place} has no drive to spare memory with; {fix}")
    slow = slow_bf16(compute_device()) if options.dtype == "auto" else ""
    if options.dtype == "auto":
        options.dtype = "fp32" if slow else "bf16"
    if slow and FIRST:
        print(f"training in fp32, which the result is in too: {slow} (--dtype bf16 trains in bf16 all the same)")
    need_bytes, purpose = result_bytes(options)
    there = next(folder for folder in (options.out, *options.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need_bytes:
        raise SystemExit(f"--out {options.out}: {free:,} bytes are free, {purpose}; give another folder")
    return options


def result_bytes(options: argparse.Namespace) -> tuple[int, str]:
    """(bytes that --out takes, what for). An adapter's own are few; codes of qlora are not counted."""
    width, folder = DTYPES[options.dtype].itemsize, options.out / "checkpoints"
    numel = sum(numel_of(file) for file in options.model.glob("*.safetensors"))
    model = numel * width if options.adapter == "none" else 0
    # A checkpoint has fp32 weights and Adam's two moments of what is trained, and plain weights of what is not.
    each = {"none": 12 * numel, "lora": width * numel, "qlora": 0}[options.adapter]
    made = len(list(folder.glob("global_step*")))
    # One more than stays is there while it is written.
    count = max(min(options.steps // options.save_every, KEPT + 1) - made, 0) if options.save_every else 0
    purpose = f"the model takes {model:,}"
    if count:
        purpose += f" and {count} checkpoints of --save-every {each:,} each"
    return model + count * each, purpose


def numel_of(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def make_config(options: argparse.Namespace) -> dict[str, Any]:
    """What a DeepSpeed JSON would say; every key is DeepSpeed's but `memory_budget`."""
    device = options.offload_to if options.offload_to in ("cpu", "none") else "nvme"
    place = {"device": device, **({"nvme_path": options.offload_to} if device == "nvme" else {})}
    memory = options.host_memory or "auto"
    budgeted = device == "nvme" and memory != "least"
    lr = options.lr if options.lr is not None else 1e-5 if options.adapter == "none" else 1e-4
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        # All batches of a step pass a layer before the next layer's weights come.
        "vertical_accumulation": True,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.dtype == "bf16"},
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
        **({"memory_budget": {"host": memory}} if budgeted else {}),
        "checkpoint": {"keep_last": KEPT},
        "log_level": "info",
    }


def texts(path: Path, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """One after another: (text, whether it lacks special tokens). Chats are in the model's own form, which has them."""
    if path.suffix.lower() not in (".jsonl", ".json"):
        yield path.read_text(encoding="utf-8", errors="replace"), True
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield text_of(line, f"{path}:{number}", tokenizer)


def text_of(line: bytes, where: str, tokenizer: Any) -> tuple[str, bool]:
    """Of one line of JSON, as `texts`."""
    try:
        sample = json.loads(line)
    except ValueError as error:  # bytes that are no UTF-8 too
        raise SystemExit(f"{where}: expected a JSON object, got {line[:40]!r}: {error}") from None
    if isinstance(sample, dict) and isinstance(sample.get("text"), str) and "messages" not in sample:
        return str(sample["text"]), True
    if not isinstance(sample, dict) or not isinstance(sample.get("messages"), list):
        kinds = sample if isinstance(sample, dict) else {"JSON": sample}
        got = ", ".join(f"{key}: {type(value).__name__}" for key, value in kinds.items()) or "no keys"
        raise SystemExit(f'{where}: expected "text", a string, or "messages", a list, got {got}')
    if getattr(tokenizer, "chat_template", None) is None:
        raise SystemExit(f'{where}: expected "text", got "messages", for which the model has no chat template')
    try:
        return str(tokenizer.apply_chat_template(sample["messages"], tokenize=False)), False
    except Exception as error:  # whatever the template of a model raises
        raise SystemExit(f"{where}: expected messages that the chat template takes, got {error!r}") from None


def samples(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Token ids, [sequence] each: all texts one behind the other, cut."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = []
    for text, special in texts(options.data, tokenizer):
        ids += [*tokenizer(text, add_special_tokens=special)["input_ids"], *end]
    count = len(ids) // options.sequence
    if count == 0:
        raise SystemExit(f"{options.data}: {len(ids)} tokens, expected at least --sequence {options.sequence}")
    return list(torch.tensor(ids[: count * options.sequence]).view(count, options.sequence))


def build(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The model: its weights go to storage as they are read, never the whole model into memory."""
    if options.adapter == "qlora":
        codes = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPES[options.dtype]
        )
        # Without a device_map transformers puts all codes on the GPU, which need not have room for them.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, quantization_config=codes, device_map={"": "cpu"}
        )
    else:
        # "auto": each weight comes from the file as it is. A cast fills memory faster than Init empties it; in bf16
        # a weight that is fp32 in the folder keeps its bits in the master.
        dtype = None if options.dtype == "bf16" else DTYPES[options.dtype]
        with zero.Init(config_dict_or_path=config, dtype=dtype):
            model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    model.train()  # from_pretrained leaves it in eval()
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
    """All steps that are left; the mean loss of the last one."""
    batches, mean = iter(zero.RepeatingLoader(engine.training_dataloader)), float("nan")

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(engine.device)
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        return loss

    with tqdm(total=options.steps, initial=engine.global_steps, disable=engine.global_rank != 0, unit="step") as bar:
        while engine.global_steps < options.steps:
            mean = engine.train_batch(batches, loss_of).item()
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}")
            if options.save_every and engine.global_steps % options.save_every == 0:
                engine.save_checkpoint(options.out / "checkpoints")
    return mean


def save(engine: Any, tokenizer: Any, options: argparse.Namespace) -> None:
    """What `from_pretrained` reads, of an adapter the adapter's folder."""
    if options.adapter == "none":
        engine.save_16bit_model(options.out)
        if engine.global_rank == 0:
            shape = transformers.AutoConfig.from_pretrained(options.model)
            shape.dtype = DTYPES[options.dtype]
            shape.save_pretrained(options.out)
            generation = getattr(engine.module, "generation_config", None)
            if (options.model / "generation_config.json").is_file():  # else the one that the model's config implies
                generation = transformers.GenerationConfig.from_pretrained(options.model)
            if generation is not None:
                generation.save_pretrained(options.out)
    else:
        with zero.GatheredParameters([p for p in engine.module.parameters() if p.requires_grad]):
            if engine.global_rank == 0:
                engine.module.save_pretrained(options.out)
    if engine.global_rank == 0:
        tokenizer.save_pretrained(options.out)


def resume(engine: Any, options: argparse.Namespace) -> None:
    """Go on from the newest checkpoint, if there is one; the engine says from which."""
    folder = options.out / "checkpoints"
    if not folder.exists():
        return
    if options.save_every:
        engine.load_checkpoint(folder)
    elif FIRST:
        print(f"warning: {folder} is not used without --save-every; with it, training goes on from there")


def run(options: argparse.Namespace) -> float:
    transformers.set_seed(options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    data, config = samples(options, tokenizer), make_config(options)
    engine = zero.initialize(model=build(options, config), config=config, training_data=data)[0]
    try:
        resume(engine, options)
        loss = train(engine, options)
        save(engine, tokenizer, options)
    finally:
        engine.close()
    if engine.global_rank == 0:
        outcome = f"loss {loss:.3f}"
        if loss != loss:
            outcome = f"step {engine.global_steps} was reached before, none was taken"
        print(f"{outcome}; the model is in {options.out}")
    return loss


def main(arguments: list[str] | None = None) -> float:
    options = parse_arguments(arguments)
    made = [folder for folder in (options.out, *options.out.parents) if not folder.exists()]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        return run(options)
    except (ConfigError, BudgetError, OSError) as error:
        message = " ".join(str(error).split())
        if getattr(error, "errno", None) == errno.ENOSPC:
            message += f"; --out needs room: {result_bytes(options)[1]}"
        raise SystemExit(f"finetune.py: {message}") from None
    except KeyboardInterrupt:
        saved = sorted((options.out / "checkpoints").glob("global_step*"))
        advice = (
            "the same command goes on from its newest checkpoint" if saved else "nothing is kept without --save-every"
        )
        print(f"interrupted; {advice}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with suppress(OSError):  # not empty: there is a result
            for folder in made:
                folder.rmdir()


if __name__ == "__main__":
    main()
