"""Start a script on several ranks, on this machine or on many: the flags of the `deepspeed` command.

Without a hostfile it runs on this machine: one rank for each visible GPU, or --num_gpus of them; on a machine without
GPUs --num_gpus ranks on the CPU, 1 if it is left out. With one, every slot of every host is a rank. Each node runs
torchrun; --local_rank=i goes before the script's arguments unless --no_local_rank says otherwise.
"""

from __future__ import annotations

import argparse

from zero.launch import arguments, launcher
from zero.tools import autotuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.autotuning is not None:
        arguments.check_arguments(options)
        options.script_args = autotuning.tune(options)
        if options.autotuning == "tune":
            return 0
    return launcher.launch(options)
