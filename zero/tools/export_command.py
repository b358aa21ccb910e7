"""Write the weights of a checkpoint as safetensors files that from_pretrained and others read.

CHECKPOINT is a folder that engine.save_checkpoint has filled (the checkpoint that its file `latest` names is taken) or
one checkpoint in it. It may come from any number of ranks. No GPU is needed, and little memory, whatever the model's
size. The model's config.json and its tokenizer's files are copied to OUT too, from --model, else where they lie in the
checkpoint's folder or the one around it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.sizes import format_bytes
from zero.checkpoint.export import CONFIG, DTYPES, copy_model_files, export, find_model_files
from zero.checkpoint.folder import open_folder
from zero.checkpoint.weights_files import MAX_SHARD_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("out", metavar="OUT", help="a folder for the files; it is created if needed")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="fp32: the exact masters (bf16)")
    parser.add_argument("--max-shard-size", metavar="SIZE", default=MAX_SHARD_SIZE, help="largest size of a file (5GB)")
    parser.add_argument("--model", metavar="FOLDER", help="the folder of the model's config.json and tokenizer files")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")


def run(options: argparse.Namespace) -> int:
    out = Path(options.out)
    with open_folder(options.checkpoint) as opened:
        files = find_model_files(opened.folder, None if options.model is None else Path(options.model))
        shards = export(
            opened,
            out,
            DTYPES[options.dtype],
            max_shard_size=options.max_shard_size,
            exclude_frozen=options.exclude_frozen,
        )
    for shard in shards:
        print(f"{out / shard.filename}: {len(shard.tensors)} tensors, {format_bytes(shard.nbytes)}")
    copied = copy_model_files(files, out, DTYPES[options.dtype], replace=options.model is not None)
    if copied:
        print(f"{', '.join(copied)}: from {', '.join(sorted({str(files[name].parent) for name in copied}))}")
    if not (out / CONFIG).exists():
        print(
            f"from_pretrained needs {CONFIG} and the tokenizer's files in {out} too: pass --model FOLDER, or call "
            f"save_pretrained({str(out)!r}) of model.config and of the tokenizer"
        )
    return 0
