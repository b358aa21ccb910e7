"""The command `zero`: one subcommand a module.

A subcommand is a module with `add_arguments(parser)` and `run(options) -> int`; the first line of its
docstring is its help. It joins by one line in COMMANDS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import zero
from offload.errors import ZeroInfinityError
from zero.tools import (
    config_command,
    doctor_command,
    export_command,
    plan_command,
    run_command,
    snapshots_command,
    trace_command,
    tune_command,
)

# Name -> module, in the order of the help.
COMMANDS: Mapping[str, ModuleType] = {
    "run": run_command,
    "plan": plan_command,
    "config": config_command,
    "trace": trace_command,
    "tune": tune_command,
    "snapshots": snapshots_command,
    "doctor": doctor_command,
    "export": export_command,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of the chosen subcommand is in its namespace."""
    parser = argparse.ArgumentParser(prog="zero", description=(zero.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"zero-infinity {zero.__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status. What the user can mend is printed without a traceback."""
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:  # said with the usage of the subcommand, where argparse would show that of `zero`
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.run is None:
        options.parser.print_help()
        return 0
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (ZeroInfinityError, OSError) as error:
        print(f"zero: {error}", file=sys.stderr)
        return 1
