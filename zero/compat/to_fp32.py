"""`zero_to_fp32.py CHECKPOINT OUT`, which lies beside the checkpoints that are saved under the name of DeepSpeed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from offload.errors import ZeroInfinityError
from zero.checkpoint.fp32 import convert_zero_checkpoint_to_fp32_state_dict
from zero.checkpoint.sharding import MAX_SHARD_SIZE

SCRIPT = '''#!/usr/bin/env python3
"""Whole fp32 weights out of the checkpoints beside this file: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR."""

import sys

from zero.compat.to_fp32 import main

sys.exit(main())
'''
TOOLS: Mapping[str, str] = {"zero_to_fp32.py": SCRIPT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a checkpoint's fp32 weights as safetensors; the exit status. The arguments are DeepSpeed's."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Whole fp32 weights, as safetensors files.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, or one of them")
    parser.add_argument("output_dir", help="folder for the files; made if it is not there")
    parser.add_argument("--max_shard_size", default=MAX_SHARD_SIZE, help="of a file (%(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="no effect: it is always so")
    parser.add_argument("-t", "--tag", help="which checkpoint; without: the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            options.max_shard_size,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
        )
    except (ZeroInfinityError, OSError) as error:
        print(f"zero_to_fp32.py: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output_dir}")
    return 0
