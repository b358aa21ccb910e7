"""Let `import deepspeed` find this library: opt in by a path, a command or an import.

`path` prints the folder to put first in PYTHONPATH; `run` starts a script with it; `launch` is `zero run` with it;
`import zero.compat.deepspeed.auto` does the same for the running process and its children.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

# The folder with the package `deepspeed` and its dist-info; its subfolder `bin` has the commands.
ALIAS = str(Path(__file__).resolve().parent.parent / "alias")


def export(environment: MutableMapping[str, str]) -> None:
    """Put the alias first in PYTHONPATH, and its commands first in PATH, for processes with this environment."""
    for name, folder in (("PYTHONPATH", ALIAS), ("PATH", os.path.join(ALIAS, "bin"))):
        others = [part for part in environment.get(name, "").split(os.pathsep) if part and part != folder]
        environment[name] = os.pathsep.join([folder, *others])


def activate() -> None:
    """Let `import deepspeed` in this process and its children find the alias.

    Raises ImportError: another `deepspeed` has been imported already.
    """
    known = sys.modules.get("deepspeed")
    where = str(getattr(known, "__file__", None) or "")
    if known is not None and not where.startswith(ALIAS):
        raise ImportError(
            f"deepspeed has already been imported, from {where}; import zero.compat.deepspeed.auto earlier, and "
            "before transformers and accelerate, which look for deepspeed"
        )
    if sys.path[:1] != [ALIAS]:
        sys.path[:] = [ALIAS, *(part for part in sys.path if part != ALIAS)]
    export(os.environ)
