"""`zero.add_config_arguments`: the command-line arguments that training scripts get for their configuration."""

from __future__ import annotations

import argparse
from typing import Any

from offload.errors import ConfigError

CONFIG_NAMES = ("zero_config", "deepspeed_config", "deepscale_config")
"""Where the path of the configuration may stand in `args`; the last is DeepSpeed's oldest name."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a script's parser, and `--zero_config`, which means the same as theirs.

    Args:
        parser: of the script. `--local_rank`, which launchers pass, stays the script's own.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("zero-infinity", "configuration, with the names of DeepSpeed")
    group.add_argument("--zero_config", type=str, default=None, metavar="FILE", help="DeepSpeed JSON for zero-infinity")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="read by scripts that can do without; no effect here"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="FILE", help="the same as --zero_config")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def config_argument(args: Any) -> Any:
    """The configuration that `args` names, or None.

    Raises:
        ConfigError: two of the names are set to different files.
    """
    given = {name: value for name in CONFIG_NAMES if (value := getattr(args, name, None)) is not None}
    if len(set(map(str, given.values()))) > 1:
        listed = ", ".join(f"--{name} {value}" for name, value in given.items())
        raise ConfigError(f"initialize: expected one configuration in args, got {listed}; give one of them")
    return next(iter(given.values()), None)
