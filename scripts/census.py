"""Counts what makes the code hard or easy to live in; docs/architecture.md says what the packages are.

    python scripts/census.py                     (a table)
    python scripts/census.py --suite pytest.log  (with the items and seconds of a run of ./scripts/test)

What runs in a forward is seen in one of eight small layers on NVMe, on the caller's thread and the I/O loop's.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("offload", "zero", "native")
SOURCES = {".py", ".c", ".h", ".cu", ".cuh", ".inc"}
SMALL = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 10_000}
"""So little that units come and go."""
SHORT_LINES, LONG_LINES = 60, 600
DIRECTIVE = re.compile(r"#\s*(-{3,}|={3,}|type:|noqa|ruff:|mypy:|pragma|!)")


def main() -> None:
    """Print the table."""
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--suite", type=Path, metavar="FILE", help="what a run of the suite printed")
    options = parsed.parse_args()
    for name, value in census(options.suite):
        print(f"{name:<48} {value}")


def census(suite: Path | None = None) -> Iterator[tuple[str, object]]:
    """What is counted, and how many there are."""
    files = sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*") if path.suffix in SOURCES)
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    modules = {module_name(path): path for path in files if path.suffix == ".py"}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    yield "product lines", sum(lines.values())
    yield from (("  " + package, count) for package, count in sorted(by_package(lines).items()))
    yield "flat modules in zero/", len(list((ROOT / "zero").glob("*.py")))
    yield "flat modules in offload/", len(list((ROOT / "offload").glob("*.py")))
    whole = [count for path, count in lines.items() if path.name != "__init__.py"]
    yield f"files under {SHORT_LINES} lines", sum(count < SHORT_LINES for count in whole)
    yield f"files over {LONG_LINES} lines", sum(count > LONG_LINES for count in whole)
    names = Counter(path.name for path in modules.values() if path.name != "__init__.py")
    yield "file names that occur more than once", sum(count > 1 for count in names.values())
    yield "modules, classes that run in a forward", weights_way()
    yield "classes that the engine inherits from", engine_classes()
    yield "attributes set from outside their class", len(late_attributes(trees))
    python = sum(lines[path] for path in modules.values())
    yield "comments per 100 lines", round(100 * sum(map(comments, modules.values())) / python, 2)
    alias = [path for path in files if "alias" in path.parts]
    yield "alias: files, lines", (len(alias), sum(lines[path] for path in alias))
    if suite is not None:
        yield "suite: last line", suite.read_text(encoding="utf-8").strip().splitlines()[-1]


def module_name(path: Path) -> str:
    """As it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def by_package(lines: dict[Path, int]) -> dict[str, int]:
    """Lines of each folder right below zero/ and offload/, and of the tops themselves."""
    found: Counter[str] = Counter()
    for path, count in lines.items():
        parts = path.relative_to(ROOT).parts
        found["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += count
    return found


def weights_way() -> tuple[int, int]:
    """Modules and classes of which something runs in a forward, on the caller's thread or the I/O loop's."""
    sys.path.insert(0, str(ROOT))
    import torch

    import zero

    entered: set[tuple[str, str]] = set()

    def seen(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.split(".")[0] in PRODUCT:
            owner = frame.f_locals.get("self")
            entered.add((name, type(owner).__qualname__ if owner is not None else ""))

    with tempfile.TemporaryDirectory() as folder:
        nvme = {"device": "nvme", "nvme_path": folder}
        keys = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme, **SMALL}
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": keys}
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        threading.setprofile(seen)  # of threads that the engine starts
        engine = zero.initialize(model=model, config=config)[0]
        for _ in range(2):  # the second finds everything made
            entered.clear()
            sys.setprofile(seen)
            engine(torch.ones(1, 64))
            sys.setprofile(None)
        found = set(entered)
        threading.setprofile(None)
        engine.close()
    return len({name for name, _ in found}), len({owner for _, owner in found if owner})


def engine_classes() -> int:
    """Classes of this project in the engine's method resolution order, itself left out."""
    sys.path.insert(0, str(ROOT))
    import zero

    return sum(kind.__module__.split(".")[0] in PRODUCT for kind in zero.ZeroEngine.__mro__[1:])


def late_attributes(trees: dict[str, ast.Module]) -> set[str]:
    """Names that a class gives its objects and that somebody else sets on them."""
    own: set[str] = set()
    late: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    (own if target.value.id in ("self", "cls") else late).add(target.attr)
                elif isinstance(target, ast.Attribute):
                    late.add(target.attr)
            if isinstance(node, ast.ClassDef):
                own |= {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
    return own & late


def comments(path: Path) -> int:
    """Comments in words; rules, headings and what tools read do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string) for token in tokens)


if __name__ == "__main__":
    main()
