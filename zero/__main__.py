"""`python -m zero` is the command `zero`."""

from __future__ import annotations

import sys

from zero.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
