"""How long does a model that lies in safetensors take until it has trained a step?

A random dense model of 1.2 B parameters in bf16, everything on NVMe or in host memory, loaded under `zero.Init` and
without it. The floor is fio's read of the model's file; the page cache is dropped before each turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_contestants import Folder, YardStick, drop_page_cache
from benchmarks.common import Candidate, Report, measure, parser, run_child
from benchmarks.contestants import our_config
from benchmarks.published import KINDS
from benchmarks.published import WIDTHS as PUBLISHED
from benchmarks.shapes import SHAPES

READ_MARK = 0.8
TOKENS, STEPS = 64, 3
WIDTHS = {"tiny": (128, 2), **PUBLISHED}
PLACES = {"NVMe": "nvme", "host memory": "cpu"}


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """One turn."""
    return run_child(["-m", "benchmarks.start_worker", json.dumps(spec)])


def turn(folder: Path, disk: Path, tier: str, *, init: bool) -> Candidate:
    """Load, initialize and train, from a cold page cache."""
    config = our_config(tier, disk, SHAPES["336M"])
    spec = {"folder": str(folder), "config": config, "init": init, "tokens": TOKENS, "steps": STEPS}

    def run() -> dict[str, Any]:
        drop_page_cache()
        return worker(spec)

    return run


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True)
    parsed.add_argument("--width", choices=list(WIDTHS), default="large", help="of the model (large: 1.2 B)")
    options = parsed.parse_args()
    report = Report("start", __doc__, options, folders=[options.path])
    with Folder(options.path) as folder:
        model_figures = worker(
            {"folder": str(folder / "model"), "model": KINDS["dense"].of_width(*WIDTHS[options.width]).model}
        )
        file = max((folder / "model").iterdir(), key=lambda path: path.stat().st_size)
        report.figure("parameters", model_figures["parameters"], f"{model_figures['parameters']:,}")
        report.figure("bytes of the model", file.stat().st_size, f"{file.stat().st_size:,}")
        with YardStick(folder, file.stat().st_size) as stick:
            candidates: dict[str, Candidate] = {
                f"{place}{' under zero.Init' * init}": turn(folder / "model", folder, tier, init=init)
                for place, tier in PLACES.items()
                for init in (False, True)
            }
            candidates["read"] = lambda: stick.read(file)
            series = measure("start", candidates, rounds=options.rounds, warmups=0, disk=options.path)
    report.keep(series)
    for name in candidates:
        if name == "read":
            continue
        for phase in ("load", "initialize", "first_step", "step"):
            report.figure(f"{name}: {phase}", series.median(name, f"{phase}_seconds"))
        for phase, phases in (("initialize", ["initialize"]), ("load and initialize", ["load", "initialize"])):
            ratios = series.ratios(
                lambda r, n=name, p=phases: r["read"].seconds / sum(r[n].figures[f"{part}_seconds"] for part in p)  # type: ignore[misc]
            )
            report.mark(f"{name}: {stick.what}'s read / {phase}", ratios, at_least=READ_MARK)
    report.finish()


if __name__ == "__main__":
    main()
