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
from zero.checkpoint.export import DTYPES, export
from zero.checkpoint.folder import open_folder
from zero.checkpoint.model_files import CONFIG, copy_model_files, find_model_files
from zero.checkpoint.weights_files import MAX_SHARD_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of checkpoints, or one of them")
    parser.add_argument("out", metavar="OUT", help="folder for the files; made if it is not there")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="fp32: the exact masters (bf16)")
    parser.add_argument("--max-shard-size", metavar="SIZE", default=MAX_SHARD_SIZE, help="of a file (5GB)")
    parser.add_argument("--model", metavar="FOLDER", help="where the model's config.json and tokenizer files are")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out what was not trained")


def run(options: argparse.Namespace) -> int:
    out = Path(options.out)
    with open_folder(options.checkpoint) as opened:
        files = find_model_files(opened.folder, None if options.model is None else Path(options.model))
        shards = export(
            opened.source,
            opened.state,
            out,
            DTYPES[options.dtype],
            max_shard_size=options.max_shard_size,
            exclude_frozen=options.exclude_frozen,
        )
    for shard in shards:
        print(f"{out / shard.filename}: {len(shard.tensors)} tensors, {format_bytes(shard.nbytes)}")
    copied = copy_model_files(files, out, replace=options.model is not None)
    if copied:
        print(f"{', '.join(copied)}: from {', '.join(sorted({str(files[name].parent) for name in copied}))}")
    if not (out / CONFIG).exists():
        print(
            f"from_pretrained needs {CONFIG} and the tokenizer's files in {out} too: give --model FOLDER, or call "
            f"model.config.save_pretrained({str(out)!r}) and the same of the tokenizer"
        )
    return 0
