"""`deepspeed.launcher.runner`: the command `deepspeed`, which is `zero run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zero.launch.environment import FILE_NAME
from zero.tools import cli

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE") or FILE_NAME
"""Where clients write variables for other nodes; the launcher reads it."""


def main(args: Sequence[str] | None = None) -> int:
    """`zero run` with these arguments; None: the command line's. The exit status."""
    return cli.main(["run", *(sys.argv[1:] if args is None else args)])


def report() -> int:
    """`zero doctor`, DeepSpeed's `ds_report`. The exit status."""
    return cli.main(["doctor"])
