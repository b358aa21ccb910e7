"""DeepSpeed's commands: `deepspeed`, which is `zero run`, `ds_report`, which is `zero doctor`, and refusals of others.

Their files in `alias/bin`, and in the distribution named deepspeed, all call `main`. The functions of
`deepspeed.launcher.runner` are here too.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload.errors import ZeroInfinityError
from zero.launch.arguments import add_arguments
from zero.launch.job import choose_nodes, parse_hostfile, read_hostfile
from zero.launch.launcher import ENVIRONMENT_FILE
from zero.tools import cli

# Where clients write variables for other nodes; the launcher reads it.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE") or ENVIRONMENT_FILE


def run(args: Sequence[str] | None = None) -> int:
    """Run `zero run` with these arguments; None: those of the command line. Returns the exit status."""
    return cli.main(["run", *(sys.argv[1:] if args is None else args)])


def report() -> int:
    """Run `zero doctor`, DeepSpeed's `ds_report`. Returns the exit status."""
    return cli.main(["doctor"])


def ds_report(words: Sequence[str]) -> int:
    """`zero doctor`, with the flags of `ds_report`."""
    parser = argparse.ArgumentParser(
        prog="ds_report", description="Show what this machine has: the same as `zero doctor`."
    )
    for flag in ("--hide_operator_status", "--hide_errors_and_warnings"):
        parser.add_argument(flag, action="store_true", help="no effect")
    parser.parse_args(words)
    return report()


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "deepspeed": run,
    "ds": run,
    "ds_report": ds_report,
    "dsr": ds_report,
}
DISKS = "`zero doctor --probe PATH` measures a disk; the engine's aio defaults are what measured fastest"
REFUSED: Mapping[str, str] = {
    "ds_bench": (
        "DeepSpeed's benchmarks of collectives are not part of zero-infinity; for NCCL use nccl-tests, for a whole "
        "step engine.statistics(); `zero doctor` lists the collectives that work on this machine"
    ),
    "ds_elastic": (
        "`zero config show FILE --world-size N` shows the batch sizes that elasticity chooses for N ranks, or says "
        "which numbers of ranks it allows"
    ),
    "ds_io": DISKS,
    "ds_nvme_tune": DISKS,
    "ds_ssh": "use ssh or pdsh; `zero run --hostfile FILE` starts ranks on the hosts of a file",
}
"""Commands that only say what to do instead. An installed DeepSpeed's would run otherwise, and fail on the alias."""


def main() -> int:
    """Run the command under whose name this process was started. Returns its exit status."""
    name = Path(sys.argv[0]).name
    if name in REFUSED:
        print(f"{name}: not available in zero-infinity; {REFUSED[name]}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](sys.argv[1:])
    except (ZeroInfinityError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


# ---- deepspeed.launcher.runner ------------------------------------------------------------------


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `zero run`; the result also has DeepSpeed's names of the script and its arguments."""
    parser = argparse.ArgumentParser(prog="deepspeed", allow_abbrev=False)
    add_arguments(parser)
    options = parser.parse_args(args)
    options.user_script, options.user_args = options.script, options.script_args
    return options


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Slots by host; None if there is no such file. Raises ConfigError, a ValueError: a bad line, or no host."""
    return read_hostfile(hostfile_path) if os.path.isfile(hostfile_path) else None


def parse_hostfile_lines(hostfile_lines: Sequence[str]) -> dict[str, int]:
    return parse_hostfile("\n".join(line.rstrip("\n") for line in hostfile_lines), "hostfile")


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The slots to use by host. Raises ConfigError, a ValueError: an unknown host or slot, or nothing left."""
    return {node.host: list(node.slots) for node in choose_nodes(resource_pool, inclusion, exclusion)}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots to use, of those in `host_info`. Raises the same errors as `parse_inclusion_exclusion`."""
    chosen = parse_inclusion_exclusion({h: max(slots) + 1 for h, slots in host_info.items()}, include_str, exclude_str)
    known = {host: [slot for slot in slots if slot in host_info[host]] for host, slots in chosen.items()}
    return {host: slots for host, slots in known.items() if slots}


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
