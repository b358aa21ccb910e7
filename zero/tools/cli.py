"""The command `zero`: one subcommand a module.

A subcommand is a module `NAME_command` with `add_arguments(parser)` and `run(options) -> int`; the first line of its
docstring is its help. It joins by its name in COMMANDS. Only the module of the subcommand that is called is imported:
most of them need torch, whose import takes seconds, and the help of the command is to come at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import zero
from offload.errors import ZeroInfinityError

# In the order of the help.
COMMANDS: Sequence[str] = ("run", "plan", "config", "trace", "tune", "snapshots", "doctor", "export")


class _Parser(argparse.ArgumentParser):
    """Names unknown flags also when required arguments are missing, since these flags are the most likely cause."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        flags = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
        unknown = [flag for flag in flags if not any(option.startswith(flag) for option in self._option_string_actions)]
        if unknown and "required" in message:
            message = f"unrecognized arguments: {' '.join(unknown)}; {message}"
        super().error(message)


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line; its namespace has the function `run` of the chosen subcommand.

    `chosen`: the subcommand whose arguments it knows; of the others it only knows the names.
    """
    parser = _Parser(prog="zero", description=(zero.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"zero-infinity {zero.__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        if name != chosen:
            commands.add_parser(name, help=_first_line(name))
            continue
        module = import_module(f"zero.tools.{name}_command")
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=_first_line(name),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=name != "run",  # else arguments of the user's script would be taken for short forms of flags
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _first_line(name: str) -> str:
    """The first line of a subcommand's docstring, read without importing it."""
    with Path(__file__).with_name(f"{name}_command.py").open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit status. Errors that a user can fix are printed without a traceback.

    Where nobody reads the output any more, it is 128 + SIGPIPE, as of a program that the signal has ended.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Flags of `zero` itself take no values, so the first word that is no flag is the subcommand.
    chosen = next((word for word in words if not word.startswith("-")), None)
    options, unknown = build_parser(chosen).parse_known_args(words)
    if unknown:  # report it with the subcommand's usage; argparse itself would print the usage of `zero`
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.run is None:
        options.parser.print_help()
        return 0
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        return 128 + signal.SIGPIPE
    except (ZeroInfinityError, OSError) as error:
        print(f"zero: {error}", file=sys.stderr)
        return 1
