"""Runs scenarios on the CPU and on the pretend GPU, in this process, and prints a verdict for each as a line of JSON.

pretend_run.py scenario:param-states:mode,mode ...

With PRETEND_SWAPS=no torch cannot swap the memory of storages, as in 2.11. With WORLD_SIZE in the environment it is
one of several ranks, each with a pretend GPU of its own, which share PRETEND_FOLDER and have collectives as PRETEND_WAY
says, see pretend_ranks.py. A rank leaves at the first error: it is no longer in step with the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [os.environ.get("PRETEND_TREE", str(TESTS.parent)), str(TESTS), str(Path(__file__).parent)]

import pretend  # noqa: E402 (before torch)
import pretend_rank_scenarios  # noqa: E402, F401 (more of them)
import torch  # noqa: E402
from pretend_scenarios import SCENARIOS, Place, Results  # noqa: E402

import offload.memory.flat_storage  # noqa: E402
import offload.streams  # noqa: E402
from offload.streams import DeviceStreams  # noqa: E402

HANGS_AFTER_SECONDS = 120
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
_numbers = itertools.count()
ALONE = {"copies_in": "_in", "copies_out": "_out", "updates": "_updates"}
"""Modes in which one stream of each engine is early, and all others late."""


class Streams(DeviceStreams):
    """Those of the product, of which one is early where the mode says so."""

    mode = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.mode in ALONE:
            pretend.early(getattr(self, ALONE[self.mode]))


def result_of(name: str, place: Place, device: str) -> Results:
    """What the scenario finds on `device`."""
    os.environ["ZERO_DEVICE"] = device
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    with scratch() as folder:
        torch.manual_seed(0)
        return SCENARIOS[name](place, folder)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one run, the same on all ranks."""
    if RANKS == 1:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    folder = Path(os.environ["PRETEND_FOLDER"]) / str(next(_numbers))
    folder.mkdir(exist_ok=True)
    yield folder


def verdict(name: str, place: Place, mode: str, reference: Results) -> str:
    """ "same", or what is wrong."""
    pretend.settle()
    Streams.mode = mode
    pretend.mode("alone" if mode in ALONE else mode)
    found = result_of(name, place, "cuda")
    gc.collect()
    pretend.settle()
    if found.keys() != reference.keys():
        return f"other names: {sorted(found.keys() ^ reference.keys())[:6]}"
    wrong = [key for key in reference if not torch.equal(reference[key], found[key])]
    return "same" if not wrong else f"{len(wrong)} of {len(reference)} differ: {wrong[:4]}"


def main(*wanted: str) -> None:
    faulthandler.enable()
    offload.streams.DeviceStreams = Streams  # type: ignore[misc]
    if os.environ.get("PRETEND_SWAPS") == "no":
        offload.memory.flat_storage.CAN_SWAP = False
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if RANKS > 1:
        import pretend_ranks

        pretend_ranks.join(os.environ["PRETEND_WAY"], Path(os.environ["PRETEND_FOLDER"]))
    for cell in wanted:
        name, pair, modes = cell.split(":")
        param, states = pair.split("-")
        reference: Results | None = None
        for mode in modes.split(","):
            try:
                if reference is None:
                    reference = result_of(name, (param, states), "cpu")
                    gc.collect()
                    gc.freeze()  # collections look at what a run on the device has made, not at all of torch
                said = verdict(name, (param, states), mode, reference)
            except Exception:
                said = traceback.format_exc(limit=-6)
                if RANKS > 1:
                    print(json.dumps([f"{name}:{pair}:{mode}", said]), flush=True)
                    os._exit(1)
            print(json.dumps([f"{name}:{pair}:{mode}", said]), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
