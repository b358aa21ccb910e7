"""Write docs/alias-refused.md: which of DeepSpeed's public names the alias refuses, by what its errors say instead."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Names of DeepSpeed that are refused

Written by `python scripts/alias_refusals.py > docs/alias-refused.md` from the tables of the alias; a test says whether
it is current. These {count} names can be imported, subclassed and used with `isinstance` ([alias.md](alias.md)). Using
one raises a NotImplementedError with the words that stand here in bold. A name that is neither here nor one of
DeepSpeed's is an AttributeError.
"""


def public_names() -> dict[str, dict[str, bool]]:
    """Module below `deepspeed` -> its public classes and functions, and whether they are refused."""
    alias = ROOT / "zero/compat/alias"
    sys.path.insert(0, str(alias))
    surface: dict[str, Any] = json.loads((alias / "deepspeed/surface.json").read_text(encoding="utf-8"))
    found = {}
    for path, entry in surface.items():
        module = importlib.import_module(f"deepspeed.{path}" if path else "deepspeed")
        names = sorted({*entry.get("classes", ()), *entry.get("functions", "").split()})
        if names:
            found[path] = {name: _is_refused(getattr(module, name)) for name in names}
    return found


def _is_refused(value: Any) -> bool:
    return (getattr(value, "__doc__", None) or "").startswith("Not available: ")


def shortened(modules: set[str], others: set[str]) -> list[str]:
    """The modules; those of a package that has none of the others as the package."""
    shown = set()
    for module in modules:
        parts = module.split(".")
        begins = (".".join(parts[:end]) for end in range(1, len(parts)))
        free = (b for b in begins if not any(other == b or other.startswith(f"{b}.") for other in others))
        shown.add(next(free, module))
    return sorted(shown)


def main() -> None:
    """Print the page."""
    from zero.compat.unavailable import instead_of

    found = public_names()
    groups: dict[str, dict[str, list[str]]] = {}
    for path, names in found.items():
        for name in (name for name, is_refused in names.items() if is_refused):
            instead = instead_of(f"{path}.{name}" if path else name)
            groups.setdefault(instead, {}).setdefault(path, []).append(name)
    print(HEAD.format(count=sum(sum(names.values()) for names in found.values())))
    for instead, modules in sorted(groups.items(), key=lambda item: min(item[1])):
        full = {path for path, refused in modules.items() if len(refused) == len(found[path])}
        whole = [f"`{path}`" for path in shortened(full, found.keys() - full)]
        some = [
            f"of `{f'deepspeed.{path}' if path else 'deepspeed'}` {', '.join(f'`{name}`' for name in refused)}"
            for path, refused in sorted(modules.items())
            if path not in full
        ]
        text = f"**{instead}**: {'; '.join([', '.join(whole), *some] if whole else some)}."
        print(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))


if __name__ == "__main__":
    main()
