"""Say what this machine has, what of it will be used, and what a fallback that is in use costs.

Nothing is changed, and without --probe no disk is measured. PATH is a folder that could be an nvme_path; without one
the current folder is looked at. --probe measures each path's disk for up to half a minute, as zero tune does, and keeps
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from zero.tools.doctor_facts import OK, SECTIONS, UNKNOWN, Fact, collect

MARKS = {OK: "", UNKNOWN: "?"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", help="folders for nvme_path (the current one)")
    parser.add_argument("--probe", action="store_true", help="measure the disks, up to half a minute each")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    facts = list(collect([Path(path) for path in options.paths] or [Path.cwd()], probe=options.probe))
    if options.json:
        listed: dict[str, list[dict[str, str]]] = {section: [] for section in SECTIONS}
        for fact in facts:
            values = dataclasses.asdict(fact)
            listed[values.pop("section")].append(values)
        print(json.dumps(listed, indent=1))
    else:
        print(render(facts))
    return 0


def render(facts: list[Fact]) -> str:
    """The facts as a table, and once more what is not as it could be."""
    width = max((len(fact.name) for fact in facts), default=0) + 2
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(section)
        for fact in facts:
            if fact.section == section:
                mark = MARKS.get(fact.verdict, "!")
                lines.append(f"{mark:>2} {fact.name:<{width}}{fact.value}".rstrip())
    worse = [fact for fact in facts if fact.verdict != OK and fact.note]
    lines.append("what to do" if worse else "nothing to do: no fallback is in use")
    lines += [f" - {fact.name}: {fact.note}" for fact in worse]
    return "\n".join(lines)
