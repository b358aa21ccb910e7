"""Checks whether `import zero` finds our package: other distributions install a package and a command of that name too.

Their package can be before ours on `sys.path`, or overwrite our files. Our package then cannot report this itself, so
this module is outside of it: the commands and the alias `deepspeed` call it first.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGE, OURS = "zero", "zero-infinity"
BEGINNING = '"""zero-infinity: '  # Our package's file begins so. If another one overwrote it, the folder is still ours.
MEND = f"pip uninstall {PACKAGE}, then pip install --force-reinstall --no-deps with the wheel or checkout of {OURS}"


def trouble() -> str:
    """Why `import zero` does not find our package: which package is found, where, and the fix. Empty if it does."""
    spec = find_spec(PACKAGE)
    if spec is None:
        return f"`import {PACKAGE}` finds no module: {OURS} is not installed for {sys.executable}; install it there"
    origin = Path(spec.origin or "")
    if origin.is_file() and origin.read_text(encoding="utf-8", errors="replace").startswith(BEGINNING):
        return ""
    path = Path(__file__).parent.with_name(PACKAGE)
    return (
        f"`import {PACKAGE}` finds {_place(spec)}{_owners()}, expected the module of {OURS} in {path}. If it is your "
        f"own file, rename it; if it was installed, {MEND}"
    )


def _place(spec: ModuleSpec) -> str:
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or "a module without a file"


def _owners() -> str:
    names = claims()
    return f" (installed by {', '.join(names)})" if names else ""


def claims() -> list[str]:
    """Other distributions, with their versions, that have a package or a command of our name. Reads all metadata."""
    from importlib import metadata  # imported late: it takes longer than `import deepspeed` may take

    packages = metadata.packages_distributions().get(PACKAGE, ())
    commands = [e.dist.name for e in metadata.entry_points(group="console_scripts", name=PACKAGE) if e.dist]
    names = {name.replace("_", "-").lower() for name in (*packages, *commands)} - {OURS}
    return sorted(f"{name} {metadata.version(name)}" for name in names)


def check() -> None:
    """Raises ImportError: `import zero` does not find our package."""
    wrong = trouble()
    if wrong:
        raise ImportError(wrong, name=PACKAGE)


def main() -> int:
    """The commands `zero` and `zero-infinity`; the exit status."""
    wrong = trouble()
    if wrong:
        print(f"{OURS}: {wrong}", file=sys.stderr)
        return 1
    # By name: this layer does not import the layer above, and the package found may not be ours.
    status: int = importlib.import_module(f"{PACKAGE}.tools.cli").main()
    return status
