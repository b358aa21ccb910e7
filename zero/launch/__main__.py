"""`python -m zero.launch` is `zero run`."""

from __future__ import annotations

import sys

from zero.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
