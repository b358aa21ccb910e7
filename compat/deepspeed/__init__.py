"""`import deepspeed`: the package lies in zero-infinity, so it is always of the version that is installed."""

from importlib.util import find_spec
from pathlib import Path

zero = find_spec("zero")  # which imports nothing
folders = [Path(folder, "compat", "alias", "deepspeed") for folder in (zero and zero.submodule_search_locations) or ()]
__path__ = [str(folder) for folder in folders if folder.is_dir()]
if not __path__:
    found = (
        f"`import zero` finds {zero.origin or zero.submodule_search_locations}" if zero else "`import zero` finds none"
    )
    raise ImportError(
        f"deepspeed: this is the alias of zero-infinity, which is not installed, or too old to have one: {found}; "
        "install zero-infinity, and pip uninstall zero if another distribution of that name is there"
    )
source = Path(__path__[0], "__init__.py")
exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"))
