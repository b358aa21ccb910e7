"""The scripts of `scripts/clients`, run as programs in the clients' processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "clients"


def run(name: str, *words: str) -> str:
    """What a script prints."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    sys.argv = [str(SCRIPTS / name), *words]
    sys.path.insert(0, str(SCRIPTS))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def loss_in(printed: str) -> float:
    """The evaluation's loss that a script has printed last."""
    return float(re.findall(r"eval_loss (\d+\.\d+)", printed)[-1])
