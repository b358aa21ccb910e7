"""Does each rank take the memory that ZeRO's formulas promise, and no more than its plan says?

The 113 M-parameter GPT with nothing offloaded, at stages 0 to 3 on 1, 2 and 4 ranks of this machine. A parameter has
a weight of 2 bytes, a gradient of 2, and optimizer states. ZeRO's paper counts 12 for those (fp32 master and two
moments); here the master is the weight and a remainder of 2 bytes, so states are 10. A stage divides by the number of
ranks: 1 the states, 2 the gradients too, 3 the weights too.

On one node ranks share memory, and what each of them would have a copy of is there once; the formulas hold for ranks
that share nothing, so each case is also run with `shared_host_memory` off.

Measured twice: the sizes of what the engine has allocated, by tiered array; and the memory of all processes above what
they had before (PSS: a page that several ranks share counts once), which includes pools and whatever else there is.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import Report, parser
from benchmarks.rank_contestants import Cell, RankBench, add_rank_arguments, ranks_config

WORKER = "benchmarks.rank_memory_worker"
WEIGHT_BYTES, GRADIENT_BYTES, PAPER_STATE_BYTES, STATE_BYTES = 2, 2, 12, 10
STATES = {"weights": WEIGHT_BYTES, "gradients": GRADIENT_BYTES, "optimizer states": STATE_BYTES}
DIVIDED_FROM_STAGE = {"weights": 3, "gradients": 2, "optimizer states": 1}
TOLERANCE = 0.05


def formula(stage: int, ranks: int, widths: dict[str, int] = STATES) -> dict[str, float]:
    """Bytes per parameter of each tiered array on a rank."""
    return {array: width / (ranks if stage >= DIVIDED_FROM_STAGE[array] else 1) for array, width in widths.items()}


def paper(stage: int, ranks: int) -> float:
    """Bytes per parameter on a rank in ZeRO's paper."""
    return sum(formula(stage, ranks, {**STATES, "optimizer states": PAPER_STATE_BYTES}).values())


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=1, disk=True)
    add_rank_arguments(parsed, warmup=0, steps=2)
    parsed.set_defaults(tokens=32)
    parsed.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parsed.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="numbers of ranks")
    options = parsed.parse_args()
    report = Report("rank_memory", __doc__, options)
    bench = RankBench(options)
    report.figure("parameters", bench.shape.numel, f"{bench.shape.numel:,}")
    for stage in options.stages:
        for world in options.worlds:
            for shared in (True, False)[: min(world, 2)]:
                ask(report, bench, stage, world, shared=shared)
    report.finish()


def ask(report: Report, bench: RankBench, stage: int, world: int, *, shared: bool) -> None:
    """One stage on so many ranks: allocations against formula and plan, processes against the plan."""
    config = ranks_config(Cell(stage), bench.path, bench.shape)
    label = f"stage {stage}, {world} ranks" if world > 1 else f"stage {stage}, 1 rank"
    if not shared:
        config["zero_optimization"]["shared_host_memory"] = False
        label += ", nothing shared"
    ranks: list[dict[str, Any]] = bench.run(WORKER, ranks=world, config=config)["ranks"]
    numel, expected = bench.shape.numel, formula(stage, world)
    report.figure(label, {"ranks": ranks, "formula": expected, "paper": paper(stage, world)}, line(ranks[0], numel))
    bounds = {"at_least": 1 - TOLERANCE, "at_most": 1 + TOLERANCE}
    for array, width in expected.items():
        ratios = [rank["allocated"].get(array, 0) / (width * numel) for rank in ranks]
        report.mark(f"{label}: {array} / formula", ratios, at_most=1 + TOLERANCE)
    report.mark(f"{label}: allocated / plan", [sum_of(r, "allocated") / sum_of(r, "planned") for r in ranks], **bounds)
    grown = sum(rank["grown_bytes"] for rank in ranks) / sum(sum_of(rank, "planned") for rank in ranks)
    report.mark(f"{label}: memory of all processes / plan", [grown], **bounds)


def sum_of(rank: dict[str, Any], which: str) -> int:
    """Bytes of all tiered arrays."""
    return sum(rank[which].values())


def line(rank: dict[str, Any], numel: int) -> str:
    """Bytes per parameter of the first rank: planned / allocated by tiered array, then the process."""
    parts = [
        f"{array} {nbytes / numel:.2f} / {rank['allocated'].get(array, 0) / numel:.2f}"
        for array, nbytes in rank["planned"].items()
        if nbytes > 0.005 * numel
    ]
    return f"{', '.join(parts)}; process {rank['grown_bytes'] / numel:.2f} bytes per parameter"


def table(result: dict[str, Any]) -> str:
    """A result as a table: bytes per parameter and rank."""
    numel = result["figures"]["parameters"]
    lines = [
        "| stage, ranks | ZeRO's formula | with our master | planned: states | with pools | measured |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in result["figures"].items():
        if not isinstance(figures, dict):
            continue
        ranks = figures["ranks"]
        count = numel * len(ranks)
        states = sum(rank["planned"].get(array, 0) for rank in ranks for array in STATES) / count
        full = sum(sum_of(rank, "planned") for rank in ranks) / count
        grown = sum(rank["grown_bytes"] for rank in ranks) / count
        formulas = f"{figures['paper']:.2f} | {sum(figures['formula'].values()):.2f}"
        lines.append(f"| {name.removeprefix('stage ')} | {formulas} | {states:.2f} | {full:.2f} | {grown:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
