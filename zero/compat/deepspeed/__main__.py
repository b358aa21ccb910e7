"""`python -m zero.compat.deepspeed path | run [-m] SCRIPT ... | launch ...`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from zero.compat.deepspeed import ALIAS, activate

USAGE = """usage: python -m zero.compat.deepspeed COMMAND
  path                       print the folder to put first in PYTHONPATH
  run [-m] SCRIPT ARGS...    run a script, or a module, whose `import deepspeed` finds the alias
  launch FLAGS SCRIPT ARGS...  the same on several ranks: `zero run`"""


def main(arguments: Sequence[str]) -> int:
    command, *rest = [*arguments, ""]
    rest = rest[:-1] if rest else []
    if command == "path" and not rest:
        print(ALIAS)
        return 0
    if command == "launch":
        activate()
        from zero.compat.commands import run as launch

        return launch(rest)
    if command == "run" and rest and rest != ["-m"]:
        activate()
        run(rest)
        return 0
    print(USAGE, file=sys.stderr)
    return 0 if command in ("-h", "--help") else 2


def run(words: list[str]) -> None:
    """Run a script or, after -m, a module in this process, as Python itself would."""
    as_module = words[0] == "-m"
    sys.argv = words[1:] if as_module else words
    if as_module:
        sys.path.insert(1, "")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(1, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
