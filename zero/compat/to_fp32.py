"""`zero_to_fp32.py CHECKPOINT OUT`: a script in each folder of checkpoints that are saved under DeepSpeed's name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch

from offload.errors import ZeroInfinityError
from zero.checkpoint import export
from zero.checkpoint.export import Folder, Model
from zero.checkpoint.folder import open_folder
from zero.checkpoint.weights_files import MAX_SHARD_SIZE
from zero.values.engine_store import unwrap_parameters

SCRIPT = '''#!/usr/bin/env python3
"""Whole fp32 weights out of the checkpoints beside this file: zero_to_fp32.py CHECKPOINT_DIR OUTPUT."""

import sys

from zero.compat.to_fp32 import main

sys.exit(main())
'''
TOOLS: Mapping[str, str] = {"zero_to_fp32.py": SCRIPT}


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Folder, tag: str | None = None) -> Model:
    """Like `zero.load_state_dict_from_zero_checkpoint`; an engine that holds the model first releases it and closes.

    DeepSpeed's scripts pass `engine.module` at the end of a training. The parameters keep the dtype that they have in
    the engine. All ranks call this. Raises ConfigError: there is no such checkpoint, or it is damaged; the engine stays
    usable. Raises StorageError: a read failed.
    """
    # Raises if there is no such checkpoint, so that the engine stays.
    with open_folder(checkpoint_dir, tag):
        pass
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    unwrap_parameters(model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    return export.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Like `zero.convert_zero_checkpoint_to_state_dict`, but it writes `pytorch_model.bin`, as DeepSpeed does."""
    export.convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, dtype, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a checkpoint's fp32 weights. Returns the exit status. The arguments are DeepSpeed's."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Write a checkpoint's whole fp32 weights, as pytorch_model.bin or as the name of the output says.",
    )
    parser.add_argument("checkpoint_dir", help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("output_dir", help="a folder, or a file such as pytorch_model.bin")
    parser.add_argument("--max_shard_size", default=MAX_SHARD_SIZE, help="largest size of a file (%(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors into a folder")
    parser.add_argument("-t", "--tag", help="which checkpoint (the one that `latest` names)")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            options.max_shard_size,
            options.safe_serialization,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
        )
    except (ZeroInfinityError, OSError) as error:
        print(f"zero_to_fp32.py: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output_dir}")
    return 0
