"""Runs unmodified clients on DeepSpeed itself and on this library, and prints how far apart they are.

    python scripts/clients/compare.py [--only WORDS] [--steps] [--json FILE]

Where DeepSpeed 0.19.8 is installed beside the clients. Each script runs in processes of its own: on DeepSpeed, on this
library, and once more on this library from weights that differ by one unit in their last place, which tells how far
rounding may take it. The rows are those of tests/clients/oracle_rows.py; the status is 1 when one is apart for
no reason that is known, or no longer apart for one that is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "clients"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from oracle import Both, Compared, why_not
from oracle_rows import ROWS

from benchmarks import machine

STEPWISE = ("loss", "grad_norm", "learning_rate", "eval_losses")


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names have all of these words")
    parser.add_argument("--steps", action="store_true", help="print the numbers of every step")
    parser.add_argument("--json", type=Path, help="file for all the figures")
    return parser.parse_args()


def figures(compared: Compared, seconds: float) -> dict[str, Any]:
    """Everything but the weights themselves."""
    sides = {"ours": compared.ours, "deepspeed": compared.theirs}
    return {
        **{side: {key: run[key] for key in ("train_loss", *STEPWISE)} for side, run in sides.items()},
        "apart": {name: {"most": gap, "allowed": may} for name, (gap, may) in compared.gaps().items()},
        "different": compared.apart(),
        "seconds": round(seconds, 1),
    }


def tell(name: str, found: dict[str, Any], steps: bool) -> None:
    """Print a row."""
    ours, theirs = found["ours"]["train_loss"][0], found["deepspeed"]["train_loss"][0]
    apart = ", ".join(f"{key} {gap['most']:.1e} ({gap['allowed']:.1e})" for key, gap in found["apart"].items())
    print(f"{name}\n    train_loss {ours!r} against {theirs!r}\n    most apart (allowed): {apart}")
    for words in found["different"]:
        print(f"    DIFFERENT{' as known' if found['known'] else ''}: {words}")
    for key in STEPWISE if steps else ():
        for side in ("ours", "deepspeed"):
            print(f"    {key:14} {side:10}", *(f"{value:.9g}" for value in found[side][key]))


def write(path: Path, rows: dict[str, Any]) -> None:
    """Put the rows into the file; others that it has stay."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else {}
    report = {"question": "clients_deepspeed", "machine": machine.describe(), "rows": {**kept, **rows}}
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    """Run the rows; 1 when one of them is different."""
    asked = arguments()
    reason = why_not()
    if reason is not None:
        print(f"compare: {reason}", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    with Both() as both:
        for name, row in ROWS.items():
            if all(word in name for word in asked.only):
                begin = time.perf_counter()
                rows[name] = {**figures(both.run(row), time.perf_counter() - begin), "known": row.known}
                tell(name, rows[name], asked.steps)
                sys.stdout.flush()
    if asked.json is not None:
        write(asked.json, rows)
    return int(any(bool(found["different"]) is not (found["known"] is not None) for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
