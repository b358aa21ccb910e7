"""Small notes that a rank leaves for its launcher: its plan, and where its state is.

The launcher names a folder in ZERO_RUN_FOLDER and reads the notes when a rank has died without an error message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "ZERO_RUN_FOLDER"  # Environment variable; if it is unset, no notes are written.


def leave_note(kind: str, facts: Mapping[str, Any]) -> None:
    """Write this rank's note of a kind; it replaces an earlier one. Never fails: notes only help to find a cause."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    path = Path(folder) / f"{kind}-{os.environ.get('RANK', '0')}.json"
    try:
        path.with_suffix(".part").write_text(json.dumps(dict(facts)), encoding="utf-8")
        path.with_suffix(".part").replace(path)
    except (OSError, TypeError, ValueError):
        return


def read_notes(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Rank -> its note of a kind; notes that cannot be read are left out."""
    notes: dict[int, dict[str, Any]] = {}
    for path in folder.glob(f"{kind}-*.json"):
        try:
            notes[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return notes
