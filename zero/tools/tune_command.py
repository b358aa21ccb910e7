"""Measure the disks below some folders and remember how to open the I/O engine; --write a configuration for a model.

Without a known result each device is measured for up to half a minute, with a file of at most 1 GB
that has no name and is gone at the end. `zero.initialize` uses the result for keys of the `aio` block
that the configuration does not set ("tune": "cached", the default).

zero tune /nvme --model FOLDER --write ds.json also runs a few steps of the model, with its weights and states where
they fit, and writes the whole configuration: tiers, budget, micro-batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from offload.disk import tuning
from offload.disk.disk_identity import identify
from offload.disk.stripes import StripeMap
from offload.disk.swapfile import check_folder, stripe_weights
from offload.sizes import format_bytes
from zero.tools import tune_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder of nvme_path")
    parser.add_argument("--force", action="store_true", help="measure again even if a result is known")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    tune_step.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    tune_step.check_arguments(options)
    folders = [check_folder(path) for path in options.paths]
    results: dict[str, tuning.Tuning] = {}
    rows = []
    for folder in folders:
        key = identify(folder).key
        tuned = results.get(key) or (None if options.force else tuning.read_cached(folder))
        source, trouble = ("cache", "") if tuned else ("measured", "")
        if tuned is None:
            if not options.json:
                print(f"{folder}: measuring for up to half a minute ...", flush=True)
            tuned = tuning.probe(folder)
            trouble = tuning.write_cached(tuned)
        results[key] = tuned
        rows.append((folder, tuned, source, trouble))
    tunings = [result for _, result, _, _ in rows]
    chosen = tuning.combine(tunings)
    weights = stripe_weights(folders, [result.mixed_bytes_per_second for result in tunings])
    stripes = StripeMap(weights).counts
    if options.write is not None:
        tune_step.write(
            options, list({r.device.key: r for r in tunings}.values()), lambda line: print(line, flush=True)
        )
        return 0
    if options.json:
        entries = [
            {"path": str(folder), "source": source, "trouble": trouble, **result.as_dict()}
            for folder, result, source, trouble in rows
        ]
        setting = {"backend": chosen.backend, "block_size": chosen.chunk_bytes, "queue_depth": chosen.queue_depth}
        print(json.dumps({"paths": entries, "chosen": setting, "stripes": stripes}, indent=1))
        return 0
    for folder, result, source, trouble in rows:
        print(describe(folder, result, source))
        if trouble:
            print(f"  {trouble}")
    print(f"in use for these paths: {chosen}")
    if len(folders) > 1:
        shares = ", ".join(f"{folder} {count}" for folder, count in zip(folders, stripes, strict=True))
        print(f"stripes of each round: {shares}")
    print(f"saved in {tuning.cache_folder()}")
    return 0


def describe(folder: Path, result: tuning.Tuning, source: str) -> str:
    when = f"measured in {result.probe_seconds:.0f} s" if source == "measured" else f"measured at {result.measured_at}"
    lines = [f"{folder}: {result.device}, {when}"]
    lines.append(f"  {'question':<14}{'candidate':<28}{'mixed':>12}{'ratio':>8}{'wins':>6}")
    for m in result.measurements:
        speed = f"{format_bytes(round(m.mixed_bytes_per_second))}/s"
        lines.append(f"  {m.question:<14}{m.setting!s:<28}{speed:>12}{m.ratio:>8.2f}{f'{m.wins}/{m.rounds}':>6}")
    lines += [f"  {reason}" for reason in result.reasons]
    lines.append(f"  chosen: {result.setting}; {result.speeds}")
    return "\n".join(lines)
