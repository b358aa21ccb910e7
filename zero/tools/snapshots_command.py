"""List the snapshots below a folder of nvme_path, or remove one.

A snapshot stays when its job ends, however it ends, until it is removed here. One that a job uses cannot be removed.
Of a job over several nodes each node lists and removes its own ranks' parts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime

from offload.files.snapshot_files import SnapshotInfo, list_snapshots, remove_snapshot
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
        freed_bytes = remove_snapshot(options.path, options.name)
        print(f"{options.name}: removed, {format_bytes(freed_bytes)} freed")
        return 0
    snapshots = list_snapshots(options.path)
    if options.json:
        print(json.dumps([asdict(snapshot) for snapshot in snapshots], indent=1))
        return 0
    print("\n".join(map(describe, snapshots)) or f"no snapshots below {options.path}")
    return 0


def describe(snapshot: SnapshotInfo) -> str:
    head = snapshot.head
    if head is None:
        state = "no snapshot was committed"
    else:
        committed = datetime.fromtimestamp(snapshot.committed_at or 0.0).isoformat(" ", "seconds")
        on_this_machine = (
            "" if head["ranks"] == len(snapshot.ranks) else f", {len(snapshot.ranks)} of them on this machine"
        )
        state = f"step {head['step']:,}, committed {committed}, {head['ranks']} ranks{on_this_machine}"
    use = ", in use" if snapshot.in_use else ""
    trouble = f" ({snapshot.trouble})" if snapshot.trouble else ""
    return f"{snapshot.name}: {state}, {format_bytes(snapshot.allocated_bytes)}{use}{trouble}"
