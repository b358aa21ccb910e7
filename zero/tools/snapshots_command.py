"""List the snapshots below a folder of nvme_path, or remove one.

A snapshot stays when its job ends, however it ends, until it is removed here. One that a job uses cannot be removed.
Of a job over several nodes each node lists and removes its own ranks' parts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime

from offload.files.snapshot_list import SnapshotInfo, list_snapshots, remove_snapshot
from offload.sizes import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the name, step, time, ranks and size of each snapshot")
    listing.add_argument("path", metavar="PATH", help="first folder of nvme_path")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    removal = actions.add_parser("rm", help="remove one snapshot and free its space")
    removal.add_argument("path", metavar="PATH", help="first folder of nvme_path")
    removal.add_argument("name", metavar="NAME", help="name, as in the list")


def run(options: argparse.Namespace) -> int:
    if options.action == "rm":
        freed = remove_snapshot(options.path, options.name)
        print(f"{options.name}: removed, {format_bytes(freed)} freed")
        return 0
    found = list_snapshots(options.path)
    if options.json:
        print(json.dumps([asdict(listed) for listed in found], indent=1))
        return 0
    print("\n".join(map(describe, found)) or f"no snapshots below {options.path}")
    return 0


def describe(listed: SnapshotInfo) -> str:
    head = listed.head
    if head is None:
        what = "no snapshot was committed"
    else:
        when = datetime.fromtimestamp(listed.committed_at or 0.0).isoformat(" ", "seconds")
        here = "" if head["ranks"] == len(listed.ranks) else f", {len(listed.ranks)} of them on this machine"
        what = f"step {head['step']:,}, committed {when}, {head['ranks']} ranks{here}"
    use = ", in use" if listed.in_use else ""
    trouble = f" ({listed.trouble})" if listed.trouble else ""
    return f"{listed.name}: {what}, {format_bytes(listed.allocated_bytes)}{use}{trouble}"
